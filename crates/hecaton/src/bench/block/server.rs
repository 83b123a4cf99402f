//! The servers that are compared. All serve memory over the protocol of network block devices, at a
//! Unix socket, and some as a drive over vhost-user at another; ours has its memory at donors.

use crate::bench::world::cluster::Cluster;
use crate::bench::world::process::{Guarded, eventually, require};
use anyhow::{Context as _, ensure};
use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

/// Where files are memory.
const MEMORY: &str = "/dev/shm";

/// A server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A volume with one copy of each page.
    Hecaton,
    /// The same with `--encrypt`.
    HecatonEncrypted,
    /// nbdkit's memory plugin.
    Nbdkit,
    /// qemu-storage-daemon, with a file in memory.
    Qemu,
}

impl Kind {
    /// All, or those that encrypt nothing.
    pub(super) fn all(encrypt: bool) -> Vec<Self> {
        let encrypted = encrypt.then_some(Self::HecatonEncrypted);
        let ours = [Self::Hecaton].into_iter().chain(encrypted);
        ours.chain([Self::Nbdkit, Self::Qemu]).collect()
    }

    pub(super) const fn is_ours(self) -> bool {
        matches!(self, Self::Hecaton | Self::HecatonEncrypted)
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hecaton => "hecaton",
            Self::HecatonEncrypted => "hecaton-encrypted",
            Self::Nbdkit => "nbdkit",
            Self::Qemu => "qemu-storage-daemon",
        }
    }

    /// The name of its export.
    const fn export(self) -> &'static str {
        match self {
            Self::HecatonEncrypted => "bench-block-encrypted",
            Self::Hecaton | Self::Nbdkit | Self::Qemu => "bench-block",
        }
    }
}

/// A server that runs, for as long as this is there.
pub(super) struct Server<'a> {
    pub(super) uri: String,
    /// Where the same memory is a drive, of those that have one.
    pub(super) drive: Option<PathBuf>,
    _behind: Behind<'a>,
}

enum Behind<'a> {
    Volume {
        _volume: Volume<'a>,
    },
    Process {
        _process: Guarded,
    },
    /// The process before its file.
    Qemu {
        _process: Guarded,
        _file: MemoryFile,
    },
}

impl<'a> Server<'a> {
    /// Starts one with `bytes`, whose sockets are in `dir`.
    pub(super) fn start(
        kind: Kind,
        bytes: u64,
        cluster: &'a Cluster,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let socket = dir.join(format!("{}.sock", kind.name()));
        let drive = dir.join(format!("{}.drive", kind.name()));
        let behind = match kind {
            Kind::Hecaton | Kind::HecatonEncrypted => {
                Behind::Volume { _volume: Volume::create(kind, bytes, cluster, &socket, &drive)? }
            }
            Kind::Nbdkit => Behind::Process { _process: nbdkit(bytes, &socket)? },
            Kind::Qemu => qemu(bytes, &socket, &drive)?,
        };
        eventually(Duration::from_secs(10), || {
            UnixStream::connect(&socket).with_context(|| format!("no {} answers", kind.name()))
        })?;
        let uri = format!("nbd+unix:///{}?socket={}", kind.export(), socket.display());
        Ok(Self { uri, drive: (kind != Kind::Nbdkit).then_some(drive), _behind: behind })
    }
}

/// A volume of the cluster. It is deleted when this is dropped.
struct Volume<'a> {
    cluster: &'a Cluster,
    name: &'static str,
}

impl<'a> Volume<'a> {
    fn create(
        kind: Kind,
        bytes: u64,
        cluster: &'a Cluster,
        socket: &Path,
        drive: &Path,
    ) -> anyhow::Result<Self> {
        let (name, bytes) = (kind.export(), bytes.to_string());
        let mut create = cluster.command("volume");
        create.args(["create", name, "--size", &bytes, "--mirror", "1"]);
        if kind == Kind::HecatonEncrypted {
            create.arg("--encrypt");
        }
        succeed(&mut create)?;
        let volume = Self { cluster, name };
        let at = format!("unix:{}", socket.display());
        succeed(cluster.command("volume").args(["export", name, "--nbd", &at]))?;
        succeed(cluster.command("volume").args(["export", name, "--vhost-user"]).arg(drive))?;
        Ok(volume)
    }
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        let Self { cluster, name } = *self;
        // A client that has just gone may still be counted.
        let deleted = crate::tools::eventually_even_if_interrupted(|| {
            succeed(cluster.command("volume").args(["delete", name]))
        });
        if let Err(error) = deleted {
            tracing::warn!("the volume {name} is left: {error:#}");
        }
    }
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let Output { status, stderr, .. } = command.stdin(Stdio::null()).output()?;
    ensure!(status.success(), "{}", String::from_utf8_lossy(&stderr).trim());
    Ok(())
}

fn nbdkit(bytes: u64, socket: &Path) -> anyhow::Result<Guarded> {
    require("nbdkit", "nbdkit").context("`scripts/setup.sh bench` installs it")?;
    Guarded::spawn(
        Command::new("nbdkit")
            .args(["--foreground", "--exit-with-parent", "--unix"])
            .arg(socket)
            .arg("memory")
            .arg(format!("size={bytes}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    )
}

fn qemu<'a>(bytes: u64, socket: &Path, drive: &Path) -> anyhow::Result<Behind<'a>> {
    require("qemu-storage-daemon", "qemu-system-common or qemu-utils")
        .context("`scripts/setup.sh bench` installs it")?;
    let (file, name) = (MemoryFile::new(bytes)?, Kind::Qemu.export());
    let process = Guarded::spawn(
        Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=ram,filename={}", file.0.display()))
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={}", socket.display()))
            .arg("--export")
            .arg(format!("type=nbd,id=bench,node-name=ram,name={name},writable=on"))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=drive,node-name=ram,writable=on,addr.type=unix,addr.path={}",
                drive.display()
            ))
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    )?;
    Ok(Behind::Qemu { _process: process, _file: file })
}

/// A file in memory, gone when this is dropped.
struct MemoryFile(PathBuf);

impl MemoryFile {
    fn new(bytes: u64) -> anyhow::Result<Self> {
        let disk = rustix::fs::statvfs(MEMORY).with_context(|| format!("there is no {MEMORY}"))?;
        ensure!(
            disk.f_bavail.saturating_mul(disk.f_frsize) >= bytes,
            "{MEMORY} has no room for {bytes} bytes; use a smaller --size"
        );
        let path = Path::new(MEMORY).join(format!("hecaton-bench-{}", std::process::id()));
        let file = fs::File::create_new(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        let made = Self(path);
        file.set_len(bytes)?;
        Ok(made)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
