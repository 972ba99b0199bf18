"""Training an order-consistent adapter: labels, examples, losses, selection and what is kept of it."""
