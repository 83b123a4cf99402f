//! The ext4 file system: makes it, and mounts it in no directory.

use super::as_text;
use crate::tools::tool;
use hecaton_uffd::files::FILE_SYSTEM_UUID;
use rustix::fs::{major, minor, stat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Most files: each shared mapping without a name is one.
const FILES: &str = "131072";

/// Makes an empty file system. It needs no journal: it does not outlive its consumer.
pub(super) fn make(device: &Path) -> anyhow::Result<()> {
    let uuid = uuid_text();
    let options = [
        ["-U", &uuid],
        ["-O", "^has_journal,^resize_inode"],
        ["-E", "lazy_itable_init=1,nodiscard"],
        ["-b", "4096"],
        ["-m", "0"],
        ["-N", FILES],
    ];
    let mut args = vec!["-q", "-F"];
    args.extend(options.iter().flatten());
    args.push(as_text(device)?);
    tool("mkfs.ext4", &args).map(drop)
}

fn uuid_text() -> String {
    let digits: String = FILE_SYSTEM_UUID.iter().map(|byte| format!("{byte:02x}")).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// Mounts it. The kernel unmounts it when nobody has it open any more. Returns its root.
pub(super) fn mount(device: &Path) -> anyhow::Result<OwnedFd> {
    let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", as_text(device)?)?;
    // The pool gets the memory of files back that are gone.
    fsconfig_set_flag(&context, "discard")?;
    // The rest of the tables of files is zeros already.
    fsconfig_set_flag(&context, "noinit_itable")?;
    // After an error that leaves it in doubt, it fails writes.
    fsconfig_set_string(&context, "errors", "remount-ro")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Major and minor number of a block device.
pub(super) fn numbers(device: &Path) -> io::Result<[u32; 2]> {
    let known = stat(device).map_err(|errno: Errno| io::Error::from(errno))?;
    Ok([major(known.st_rdev), minor(known.st_rdev)])
}
