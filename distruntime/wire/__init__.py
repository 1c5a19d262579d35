"""Messages, their bytes and the sockets that carry them: shared by the master and the workers."""
