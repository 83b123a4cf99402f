//! Aborts the connection of a mount, so that processes that wait for an answer get an error.

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, openat, statx};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::io;
use std::os::fd::OwnedFd;

/// The file that aborts the FUSE connection of a mount.
pub(super) struct Abort(OwnedFd);

impl Abort {
    /// Opens the file in advance: once pager and node are gone, a call on the mount may not return.
    pub(super) fn of(mount: &OwnedFd) -> io::Result<Abort> {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let none = MountAttrFlags::empty();
        let connections = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, none)?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let known = statx(mount, "", flags, StatxFlags::TYPE)?;
        let path = format!("{}/abort", known.stx_dev_minor);
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(Abort(openat(&connections, path, flags, Mode::empty())?))
    }

    pub(super) fn now(&self) {
        // Fails if the mount is gone.
        let _ = rustix::io::write(&self.0, b"1");
    }
}
