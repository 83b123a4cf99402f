//! Creates a FUSE mount that has no place in any directory.

use hecaton_fuse::wire;
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{getegid, geteuid};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

pub(super) struct Mount {
    /// `/dev/fuse`: the kernel's requests are read here.
    pub(super) device: OwnedFd,
    /// Root of the mount: files are opened here. The kernel unmounts it when the last copy of this
    /// descriptor is closed.
    pub(super) directory: OwnedFd,
}

impl Mount {
    /// Needs CAP_SYS_ADMIN and Linux 6.9.
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
        // Programs of other users have files of the mount open, too.
        fsconfig_set_flag(&context, "allow_other")?;
        // The kernel checks owner and mode, as on a tmpfs.
        fsconfig_set_flag(&context, "default_permissions")?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOATIME;
        let directory = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        // Before 6.9, Linux cannot resend: programs would wait forever after a crash of the pager.
        rustix::io::write(&device, &wire::resend())
            .map_err(|_| io::Error::other("shared memory needs Linux 6.9 or newer"))?;
        Ok(Mount { device, directory })
    }
}
