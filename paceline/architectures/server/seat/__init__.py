"""The server's end of an exchange: sums, optimizers and weights of the chunks of one seat."""
