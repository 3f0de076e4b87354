"""What the schedulers of both roles are made of: queues, the order of turns, suspects, and costs."""
