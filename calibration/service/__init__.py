"""The running application, and the files that describe it."""
