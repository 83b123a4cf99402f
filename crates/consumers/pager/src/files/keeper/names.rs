//! Opens files of the mount so that the kernel forgets their names at once.
//!
//! The kernel keeps names, and with a name the file and its pages, also when nobody has the file
//! open any more. A file without a name must go with its last descriptor.

use hecaton_fuse::wire::forget_name;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// The mount.
pub(super) struct Mount {
    /// Its root.
    pub(super) directory: OwnedFd,
    /// `/dev/fuse`, for notices to the kernel. The pager answers its requests.
    pub(super) device: OwnedFd,
}

impl Mount {
    /// Opens a file by a name that only this call uses.
    pub(super) fn open_once(
        &self,
        name: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        let opened = openat(&self.directory, name, flags | OFlags::CLOEXEC, mode);
        // Fails if the kernel does not know the name.
        let _ = rustix::io::write(&self.device, &forget_name(name));
        opened
    }

    /// Opens a file by its inode number.
    pub(super) fn open_node(&self, node: u64) -> Result<OwnedFd, Errno> {
        self.open_once(format!("#{node}").as_bytes(), OFlags::RDWR, Mode::empty())
    }
}
