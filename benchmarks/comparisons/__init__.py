"""The comparisons of `make bench`. Each module measures one thing against a floor, against peers or against itself."""
