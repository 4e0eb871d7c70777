"""Training: gradients of graphs, losses, optimizers and the loop. Imported only when it is used."""
