"""What crosses a process boundary: messages, their encoding, sockets, metrics and command-line options."""
