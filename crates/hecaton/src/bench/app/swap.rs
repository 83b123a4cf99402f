//! Swap devices to compare with. Each is in place from `open` until it goes out of scope.
//!
//! The parts of a device are fields in the order in which they must go: swap off first, then the
//! device, then what is behind it.

use crate::bench::world::process::{Guarded, eventually, require, tool};
use crate::swap_device::{Loop, SwapOn};
use crate::tools::take_down;
use anyhow::{Context as _, bail, ensure};
use std::{
    fs,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// The swap device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(in crate::bench) enum Kind {
    /// A swap file.
    Disk,
    /// Compressed memory.
    Zram,
    /// nbdkit's memory server, by TCP, through nbdfuse and a loop device.
    Nbdkit,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Disk, Self::Zram, Self::Nbdkit];

    pub(in crate::bench) const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk swap",
            Self::Zram => "zram",
            Self::Nbdkit => "nbdkit swap",
        }
    }
}

/// A swap device in use.
pub(in crate::bench) enum Swap {
    Disk { _on: SwapOn, _loop: Option<Loop>, _file: SwapFile },
    Zram { _on: SwapOn, zram: Zram },
    Nbdkit { _on: SwapOn, _loop: Loop, _mount: Mount, _fuse: Guarded, _server: Guarded },
}

impl Swap {
    /// Puts `bytes` of swap of a kind in place. `dir` is a directory on a disk.
    pub(super) fn open(kind: Kind, bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "swap devices need root");
        check_none()?;
        match kind {
            Kind::Disk => open_disk(bytes, dir),
            Kind::Zram => open_zram(bytes),
            Kind::Nbdkit => open_nbdkit(bytes, dir),
        }
    }

    /// Local memory that the device itself took at most. It is outside of the program's limit: a
    /// peer that compresses in place gets it for nothing.
    pub(super) fn own_local_bytes(&self) -> Option<u64> {
        match self {
            Self::Zram { zram, .. } => zram.peak_bytes(),
            _ => None,
        }
    }
}

/// Fails if the machine swaps to anything.
pub(super) fn check_none() -> anyhow::Result<()> {
    let others = fs::read_to_string("/proc/swaps").context("cannot read /proc/swaps")?;
    if let Some(other) = others.lines().nth(1).and_then(|line| line.split_whitespace().next()) {
        bail!(
            "the machine already swaps to {other}, so it would not be clear what is measured; \
             `swapoff {other}` takes that out of use"
        );
    }
    Ok(())
}

fn open_disk(bytes: u64, dir: &Path) -> anyhow::Result<Swap> {
    let in_memory = tool("stat", &["-f", "-c", "%T", &dir.to_string_lossy()])?;
    ensure!(
        !matches!(in_memory.as_str(), "tmpfs" | "ramfs"),
        "{} is in memory; name a directory on a disk with --dir",
        dir.display()
    );
    let file = SwapFile::new(dir.join("swapfile"), bytes)?;
    let path = file.0.to_string_lossy();
    tool("mkswap", &[&path])?;
    // Some file systems (overlayfs, btrfs with checksums) cannot be swapped to; a loop device over
    // the same file can.
    match SwapOn::new(&path) {
        Ok(on) => Ok(Swap::Disk { _on: on, _loop: None, _file: file }),
        Err(_) => {
            let device = Loop::new(&path)?;
            Ok(Swap::Disk { _on: SwapOn::new(device.path())?, _loop: Some(device), _file: file })
        }
    }
}

fn open_zram(bytes: u64) -> anyhow::Result<Swap> {
    require("zramctl", "util-linux")?;
    let zram = Zram::new(bytes)?;
    tool("mkswap", &[&zram.0])?;
    Ok(Swap::Zram { _on: SwapOn::new(&zram.0)?, zram })
}

fn open_nbdkit(bytes: u64, dir: &Path) -> anyhow::Result<Swap> {
    require("nbdkit", "nbdkit")?;
    require("nbdfuse", "libnbd-bin")?;
    require("fusermount3", "fuse3")?;
    ensure!(Path::new("/dev/fuse").exists(), "there is no /dev/fuse");

    let port = free_port()?;
    let server = Guarded::spawn(
        Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--ipaddr", "127.0.0.1", "--port"])
            .arg(port.to_string())
            .arg("memory")
            .arg(format!("size={bytes}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    )?;
    eventually(Duration::from_secs(10), || {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("nbdkit does not answer")
    })?;

    let point = dir.join("nbd");
    fs::create_dir_all(&point)?;
    let file = point.join("disk");
    let fuse = Guarded::spawn(
        Command::new("nbdfuse")
            .arg(&file)
            .arg(format!("nbd://127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // It complains about being unmounted, which is how it is ended.
            .stderr(Stdio::null()),
    )?;
    let mount = Mount(point);
    eventually(Duration::from_secs(10), || {
        fs::metadata(&file).context("nbdfuse does not mount the disk")
    })?;
    let device = Loop::new(&file.to_string_lossy())?;
    tool("mkswap", &[device.path()])?;
    let on = SwapOn::new(device.path())?;
    Ok(Swap::Nbdkit { _on: on, _loop: device, _mount: mount, _fuse: fuse, _server: server })
}

/// A loopback port that was free a moment ago.
pub(super) fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("there is no free port")?;
    Ok(listener.local_addr()?.port())
}

pub(in crate::bench) struct Zram(String);

impl Zram {
    fn new(bytes: u64) -> anyhow::Result<Self> {
        ensure!(
            Path::new("/sys/class/zram-control").exists() || Path::new("/dev/zram0").exists(),
            "the kernel has no zram"
        );
        tool("zramctl", &["--find", "--size", &bytes.to_string()]).map(Self)
    }

    /// The fifth number of `mm_stat` (Documentation/admin-guide/blockdev/zram.rst).
    fn peak_bytes(&self) -> Option<u64> {
        let name = self.0.strip_prefix("/dev/")?;
        let stat = fs::read_to_string(format!("/sys/block/{name}/mm_stat")).ok()?;
        stat.split_whitespace().nth(4)?.parse().ok()
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        take_down("zramctl", &["--reset", &self.0]);
    }
}

pub(in crate::bench) struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        take_down("fusermount3", &["-u", &self.0.to_string_lossy()]);
    }
}

pub(in crate::bench) struct SwapFile(PathBuf);

impl SwapFile {
    fn new(path: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        let file = Self(path);
        fs::File::create(&file.0)
            .and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600)))
            .with_context(|| format!("cannot make {}", file.0.display()))?;
        // A swap file may have no holes.
        let (bytes, path) = (bytes.to_string(), file.0.to_string_lossy().into_owned());
        tool("fallocate", &["--length", &bytes, &path])?;
        Ok(file)
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swaps() -> String {
        fs::read_to_string("/proc/swaps").unwrap()
    }

    #[test]
    fn every_kind_comes_up_and_leaves_nothing() {
        let before = swaps();
        for kind in Kind::ALL {
            let dir = tempfile::Builder::new().tempdir_in(crate::bench::DISK).unwrap();
            match Swap::open(kind, 64 << 20, dir.path()) {
                Ok(swap) => {
                    assert_ne!(swaps(), before, "{kind:?}");
                    drop(swap);
                }
                Err(error) => println!("skipped: {}: {error:#}", kind.name()),
            }
            assert_eq!(swaps(), before, "{kind:?}");
            let left: Vec<_> = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_file())
                .collect();
            assert!(left.is_empty(), "{kind:?}: {left:?}");
        }
    }
}
