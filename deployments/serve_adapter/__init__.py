"""All that leans on Serve's own extension points. A new version of Ray changes nothing outside of this folder."""
