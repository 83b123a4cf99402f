//! A mount of files that has no place in any directory.

use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{getegid, geteuid};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// The two ends of a mount.
pub(super) struct Mount {
    /// Where the kernel's requests are read.
    pub(super) device: OwnedFd,
    /// Where files are opened. The mount goes with the last copy of this descriptor.
    pub(super) directory: OwnedFd,
}

impl Mount {
    /// Takes the right to mount (CAP_SYS_ADMIN).
    pub(super) fn new() -> io::Result<Mount> {
        let device = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let numbers = [
            ("fd", device.as_raw_fd().to_string()),
            ("rootmode", "40000".to_owned()),
            ("user_id", geteuid().as_raw().to_string()),
            ("group_id", getegid().as_raw().to_string()),
        ];
        fsconfig_set_string(&context, "source", "hecaton")?;
        for (key, number) in numbers {
            fsconfig_set_string(&context, key, number)?;
        }
        // Programs of other users have files of it open, too.
        fsconfig_set_flag(&context, "allow_other")?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOATIME;
        let directory = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Mount { device, directory })
    }
}
