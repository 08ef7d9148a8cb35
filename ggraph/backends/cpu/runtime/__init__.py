"""What runs programs: threads that replay them, their memory, and their tempo."""
