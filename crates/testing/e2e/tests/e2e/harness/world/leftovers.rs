//! Removes what worlds leave that no namespace holds: swap, loop devices, cgroups, directories.
//!
//! A world that ends removes its own. One whose runner was killed is found by the next test that
//! starts: nobody holds the lock in its directory any more.

use super::cgroups;
use rustix::fs::FlockOperation;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Removes what is left of worlds whose processes have all ended.
pub(crate) fn remove() {
    for entry in fs::read_dir(env::temp_dir()).into_iter().flatten().flatten() {
        let is_world = entry.file_name().to_string_lossy().starts_with(super::PREFIX);
        if is_world && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_world(&entry.path());
        }
    }
}

/// Removes what is left of one world, if all of its processes have ended.
pub(crate) fn remove_world(dir: &Path) {
    let Ok(_lock) = super::lock(dir, FlockOperation::NonBlockingLockExclusive) else { return };
    for device in dead_loop_devices() {
        let _ = Command::new("swapoff").arg(&device).stderr(Stdio::null()).status();
        let _ = Command::new("losetup").arg("--detach").arg(&device).status();
    }
    cgroups::remove(dir);
    let _ = fs::remove_dir_all(dir);
}

/// The loop devices, each with the path of its file. The path is as seen from where the file is
/// mounted, which may be another mount namespace.
fn loop_devices() -> Vec<(PathBuf, String)> {
    let mut devices = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        if let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) {
            let device = Path::new("/dev").join(entry.file_name());
            devices.push((device, file.trim_end().to_owned()));
        }
    }
    devices
}

/// Loop devices over a file that was mounted by a process of FUSE, and is nowhere any more: such a
/// device outlives its mount namespace, and nobody can use what is on it. The kernel calls its file
/// the root of a mount.
fn dead_loop_devices() -> Vec<PathBuf> {
    let devices = loop_devices().into_iter().filter(|(_, file)| file == "/");
    devices.map(|(device, _)| device).collect()
}

/// Loop devices over files that are mounted in this world by FUSE.
pub(crate) fn loop_devices_here() -> anyhow::Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    // 36 35 0:52 / /tmp/file rw - fuse ...: the third field is the device, the fifth the place.
    let is_fuse =
        |line: &&str| line.split(" - ").nth(1).is_some_and(|kind| kind.starts_with("fuse"));
    let places: Vec<&str> =
        mounts.lines().filter(is_fuse).filter_map(|line| line.split(' ').nth(4)).collect();
    let is_here = |file: &str| places.iter().any(|place| Path::new(file).starts_with(place));
    let devices = loop_devices().into_iter().filter(|(_, file)| is_here(file));
    Ok(devices.map(|(device, _)| device).collect())
}
