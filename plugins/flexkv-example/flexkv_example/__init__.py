"""The smallest plug-ins: `device.ThreadDevice`, `policy.Longest`, `store.FolderStore`."""
