//! Removes what worlds leave that no namespace holds: swap, loop devices, cgroups, directories.
//!
//! A world that ends removes its own. One whose runner was killed is found by the next test that
//! starts: nobody holds the lock in its directory any more.

use super::{cgroups, world};
use rustix::fs::FlockOperation;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Removes what is left of worlds whose processes have all ended.
pub(crate) fn remove() {
    for entry in fs::read_dir(env::temp_dir()).into_iter().flatten().flatten() {
        let is_world = entry.file_name().to_string_lossy().starts_with(world::PREFIX);
        if is_world && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_world(&entry.path());
        }
    }
}

/// Removes what is left of one world, if all of its processes have ended.
pub(crate) fn remove_world(dir: &Path) {
    let Ok(_lock) = world::lock(dir, FlockOperation::NonBlockingLockExclusive) else { return };
    for device in loop_devices_of(dir) {
        let _ = Command::new("swapoff").arg(&device).stderr(Stdio::null()).status();
        let _ = Command::new("losetup").arg("--detach").arg(&device).status();
    }
    cgroups::remove(dir);
    let _ = fs::remove_dir_all(dir);
}

/// Loop devices whose file is, or was, in a directory.
pub(crate) fn loop_devices_of(dir: &Path) -> Vec<PathBuf> {
    let mut devices = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if Path::new(file.trim_end()).starts_with(dir) {
            devices.push(Path::new("/dev").join(entry.file_name()));
        }
    }
    devices
}
