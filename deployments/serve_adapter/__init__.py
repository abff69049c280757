"""Everything that depends on Serve's extension points. A new version of Ray changes nothing outside this folder."""
