"""Parameter servers: the client in a worker, the loop of a member, the server, its memory."""
