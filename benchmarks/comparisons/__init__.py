"""`make bench`: each module measures one thing beside its floor, its peers or itself."""
