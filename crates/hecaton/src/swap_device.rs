//! Block devices that are swapped to.

use crate::tools::{require, take_down, tool};

/// Swap in use. It is taken out of use when this is dropped.
pub(crate) struct SwapOn(String);

impl SwapOn {
    pub(crate) fn new(device: &str) -> anyhow::Result<Self> {
        Self::with(&[], device)
    }

    /// With options of swapon(8).
    pub(crate) fn with(options: &[&str], device: &str) -> anyhow::Result<Self> {
        tool("swapon", &[options, &[device]].concat())?;
        Ok(Self(device.to_owned()))
    }
}

impl Drop for SwapOn {
    fn drop(&mut self) {
        take_down("swapoff", &[&self.0]);
    }
}

/// A loop device. It goes when this is dropped.
pub(crate) struct Loop(String);

impl Loop {
    /// Without a page cache of its own where the file allows it: with one, the memory of this host
    /// would serve what the device behind it should.
    pub(crate) fn new(file: &str) -> anyhow::Result<Self> {
        Self::direct(file).or_else(|_| tool("losetup", &["--find", "--show", file]).map(Self))
    }

    /// Without a page cache of its own, or not at all.
    pub(crate) fn direct(file: &str) -> anyhow::Result<Self> {
        require("losetup", "mount")?;
        tool("losetup", &["--find", "--show", "--direct-io=on", file]).map(Self)
    }

    /// Its name in /dev.
    pub(crate) fn path(&self) -> &str {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        take_down("losetup", &["--detach", &self.0]);
    }
}
