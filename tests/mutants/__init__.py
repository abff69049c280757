"""Planted faults: `python -m tests.mutants` changes pure modules in one place at a time. Does a test notice?"""
