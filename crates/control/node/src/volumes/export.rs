//! Where clients reach a volume: sockets and mounts, which the node keeps.

use hecaton_block::Front;
use hecaton_block::attach;
use hecaton_block::fuse::{Mount, MountError};
use hecaton_block::ublk::{self, Disk, Owner, UblkError};
use hecaton_pki::{Credentials, CredentialsError, Identity, Role};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Clients that may wait to be taken.
const BACKLOG: i32 = 32;

/// Where clients reach a volume. Written `HOST:PORT`, `unix:PATH`, `vhost-user:PATH`, `fuse:PATH`,
/// `ublk:NUMBER`, or `ublk` for whatever number is free; `nodes:HOST:PORT` is where other nodes'
/// processes come that read it by themselves, and `nodes` at the address of this node's donors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ExportAddress {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
    /// A socket in the file system for machine monitors.
    VhostUser(PathBuf),
    /// A file that is the volume.
    Fuse(PathBuf),
    /// A block device of this host, with its number, or any.
    Ublk(Option<u32>),
    /// An address for other nodes, which read it by themselves; or that of this node's donors.
    Nodes(Option<SocketAddr>),
}

/// One place at which a volume is served, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// Where clients reach it.
    pub address: ExportAddress,
    /// Nothing may be written there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Clients are to speak TLS, and are shown the certificate in this directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<PathBuf>,
    /// The requests of a file come through io_uring, as far as is known: so it is lost to those who
    /// have it open when the process that serves it is killed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uring: bool,
}

/// A text that is no [`ExportAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address for an export: write 127.0.0.1:10809, or unix:/PATH")]
pub struct AddressError(pub String);

/// Why a volume is not exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}, give another address")]
    Listen {
        /// The address.
        address: ExportAddress,
        /// Why.
        source: io::Error,
    },
    /// Only clients of NBD speak TLS.
    #[error("an export at {0} has no TLS: that is for NBD addresses")]
    NoTls(ExportAddress),
    /// Only a file's requests come that way.
    #[error("an export at {0} has no requests through io_uring: a file has")]
    NoUring(ExportAddress),
    /// The certificate cannot be used.
    #[error("no certificate for the export at {address}")]
    Certificate {
        /// Where it was to be shown.
        address: ExportAddress,
        /// Why not.
        source: CredentialsError,
    },
    /// It is for something else.
    #[error(
        "the certificate in {} is of {identity}; `hecaton pki issue NAME --role export --host HOST` makes \
         one that fits",
        .dir.display()
    )]
    Role {
        /// Where it is.
        dir: PathBuf,
        /// The identity in it.
        identity: Identity,
    },
    /// The file cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// There is no block device.
    #[error(transparent)]
    Ublk(#[from] UblkError),
}

impl FromStr for ExportAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<ExportAddress, AddressError> {
        let refused = || AddressError(text.to_owned());
        match text.split_once(':') {
            Some(("unix" | "vhost-user" | "fuse", "")) => Err(refused()),
            Some(("unix", path)) => Ok(ExportAddress::Unix(path.into())),
            Some(("vhost-user", path)) => Ok(ExportAddress::VhostUser(path.into())),
            Some(("fuse", path)) => Ok(ExportAddress::Fuse(path.into())),
            Some(("ublk", number)) => {
                number.parse().map(Some).map(ExportAddress::Ublk).map_err(|_| refused())
            }
            Some(("nodes", address)) => {
                address.parse().map(Some).map(ExportAddress::Nodes).map_err(|_| refused())
            }
            None if text == "ublk" => Ok(ExportAddress::Ublk(None)),
            None if text == "nodes" => Ok(ExportAddress::Nodes(None)),
            _ => text.parse().map(ExportAddress::Tcp).map_err(|_| refused()),
        }
    }
}

impl TryFrom<String> for ExportAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<ExportAddress, AddressError> {
        text.parse()
    }
}

impl From<ExportAddress> for String {
    fn from(address: ExportAddress) -> String {
        address.to_string()
    }
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportAddress::Tcp(address) => address.fmt(f),
            ExportAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ExportAddress::VhostUser(path) => write!(f, "vhost-user:{}", path.display()),
            ExportAddress::Fuse(path) => write!(f, "fuse:{}", path.display()),
            ExportAddress::Ublk(None) => f.write_str("ublk"),
            ExportAddress::Ublk(Some(number)) => write!(f, "ublk:{number}"),
            ExportAddress::Nodes(None) => f.write_str("nodes"),
            ExportAddress::Nodes(Some(address)) => write!(f, "nodes:{address}"),
        }
    }
}

impl Exported {
    /// Role of its clients: reader or writer.
    pub fn role(&self) -> attach::Role {
        match self.read_only {
            true => attach::Role::Reader,
            false => attach::Role::Writer,
        }
    }

    /// Whether there can be such an export at all.
    pub(super) fn check(&self) -> Result<(), ExportError> {
        let address = || self.address.clone();
        if self.uring && !matches!(self.address, ExportAddress::Fuse(_)) {
            return Err(ExportError::NoUring(address()));
        }
        match (self.address.front(), &self.tls) {
            (Some(Front::Nbd), None) => Ok(()),
            (Some(Front::Nbd), Some(dir)) => {
                let credentials = Credentials::open(dir);
                let credentials = credentials
                    .map_err(|source| ExportError::Certificate { address: address(), source })?;
                match &credentials.now().identity {
                    Identity { role: Role::Export, .. } => Ok(()),
                    other => Err(ExportError::Role { dir: dir.clone(), identity: other.clone() }),
                }
            }
            (Some(Front::VhostUser) | None, Some(_)) => Err(ExportError::NoTls(address())),
            (Some(Front::VhostUser) | None, None) => Ok(()),
        }
    }
}

impl ExportAddress {
    /// Protocol of its clients; `None` for a file, a block device, or other nodes.
    pub fn front(&self) -> Option<Front> {
        match self {
            ExportAddress::Tcp(_) | ExportAddress::Unix(_) => Some(Front::Nbd),
            ExportAddress::VhostUser(_) => Some(Front::VhostUser),
            ExportAddress::Fuse(_) | ExportAddress::Ublk(_) | ExportAddress::Nodes(_) => None,
        }
    }

    /// Whether the kernel has it, caches what is in it, and writes when it likes.
    pub(super) fn is_of_kernel(&self) -> bool {
        matches!(self, ExportAddress::Fuse(_) | ExportAddress::Ublk(_))
    }

    /// Whether it is the one that is meant.
    pub(super) fn is_meant_by(&self, wanted: &ExportAddress) -> bool {
        let is_any = matches!(
            (self, wanted),
            (ExportAddress::Ublk(_), ExportAddress::Ublk(None))
                | (ExportAddress::Nodes(_), ExportAddress::Nodes(None))
        );
        is_any || self == wanted
    }

    /// The socket's file, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            ExportAddress::Tcp(_)
            | ExportAddress::Fuse(_)
            | ExportAddress::Ublk(_)
            | ExportAddress::Nodes(_) => None,
            ExportAddress::Unix(path) | ExportAddress::VhostUser(path) => Some(path),
        }
    }
}

/// Socket, file or block device at which clients reach a volume, with the descriptor that the
/// volume's process needs. Dropping it removes it.
#[derive(Debug)]
pub(super) enum Entrance {
    /// A socket that they connect to.
    Socket(Listener),
    /// A file that they open.
    File(Mount),
    /// A block device that they open.
    Disk(Disk),
}

impl Entrance {
    /// One that is checked already, to a volume of so many bytes.
    pub(super) fn open(
        export: &Exported,
        volume: &str,
        bytes: u64,
        owner: Owner,
    ) -> Result<Entrance, ExportError> {
        match &export.address {
            ExportAddress::Ublk(_) => Ok(Entrance::Disk(Disk::new(bytes, export.role(), owner)?)),
            ExportAddress::Fuse(path) => {
                Ok(Entrance::File(Mount::new(path, volume, export.role())?))
            }
            address => Listener::bind(address).map(Entrance::Socket),
        }
    }

    /// One that a node before this one has opened.
    pub(super) fn adopt(export: Exported, fd: OwnedFd, volume: &str) -> Entrance {
        let role = export.role();
        match export.address {
            ExportAddress::Fuse(path) => Entrance::File(Mount::adopt(path, volume, role, fd)),
            ExportAddress::Ublk(Some(number)) => Entrance::Disk(Disk::adopt(number, fd)),
            address => Entrance::Socket(Listener { address, socket: fd }),
        }
    }

    pub(super) fn address(&self) -> ExportAddress {
        match self {
            Entrance::Socket(listener) => listener.address.clone(),
            Entrance::File(mount) => ExportAddress::Fuse(mount.path().to_owned()),
            Entrance::Disk(disk) => ExportAddress::Ublk(Some(disk.number())),
        }
    }

    /// Makes it ready for another process than the one that died.
    pub(super) fn succeed(&mut self, over_uring: bool) -> Result<(), MountError> {
        match self {
            // Clients that were not accepted wait in the socket's queue. The kernel repeats a
            // block device's unanswered requests.
            Entrance::Socket(_) | Entrance::Disk(_) => Ok(()),
            Entrance::File(mount) if over_uring => mount.replace(),
            Entrance::File(mount) => mount.resend(),
        }
    }

    /// The file or device, if a program uses it. Only the volume's process knows the clients of a
    /// socket.
    pub(super) fn file_in_use(&self) -> Option<&Path> {
        match self {
            Entrance::File(mount) if mount.is_in_use() => Some(mount.path()),
            Entrance::Disk(disk) if ublk::disk::is_in_use(disk.path()) => Some(disk.path()),
            Entrance::File(_) | Entrance::Disk(_) | Entrance::Socket(_) => None,
        }
    }
}

impl AsFd for Entrance {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Entrance::Socket(listener) => listener.socket.as_fd(),
            Entrance::File(mount) => mount.as_fd(),
            Entrance::Disk(disk) => disk.as_fd(),
        }
    }
}

/// A socket that clients connect to. Its file goes with it.
#[derive(Debug)]
pub(super) struct Listener {
    address: ExportAddress,
    socket: OwnedFd,
}

impl Listener {
    fn bind(address: &ExportAddress) -> Result<Listener, ExportError> {
        let failed = |source| ExportError::Listen { address: address.clone(), source };
        let bind_tcp = |wanted: &SocketAddr| {
            let listener = TcpListener::bind(wanted)?;
            Ok((listener.local_addr()?, OwnedFd::from(listener)))
        };
        match address {
            ExportAddress::Tcp(wanted) => {
                let (bound, socket) = bind_tcp(wanted).map_err(failed)?;
                Ok(Listener { address: ExportAddress::Tcp(bound), socket })
            }
            ExportAddress::Nodes(Some(wanted)) => {
                let (bound, socket) = bind_tcp(wanted).map_err(failed)?;
                Ok(Listener { address: ExportAddress::Nodes(Some(bound)), socket })
            }
            ExportAddress::Unix(path) | ExportAddress::VhostUser(path) => {
                let socket = bind_unix(path).map_err(failed)?;
                Ok(Listener { address: address.clone(), socket })
            }
            ExportAddress::Fuse(_) | ExportAddress::Ublk(_) | ExportAddress::Nodes(None) => {
                unreachable!("not a socket")
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = self.address.path() {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Only this user, and root, may connect.
fn bind_unix(path: &Path) -> io::Result<OwnedFd> {
    let name = SocketAddrUnix::new(path.as_os_str().as_bytes())?;
    remove_if_dead(path);
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &name)?;
    // Nobody can connect before it listens.
    let opened = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| Ok(rustix::net::listen(&socket, BACKLOG)?));
    match opened {
        Ok(()) => Ok(socket),
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Removes a socket that nobody listens on any more, as a killed node leaves it.
fn remove_if_dead(path: &Path) {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let is_dead = || {
        UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    if is_socket && is_dead() {
        // If this fails, binding reports that the address is in use.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in [
            "127.0.0.1:10809",
            "[::1]:1",
            "unix:/run/a.sock",
            "fuse:/mnt/a",
            "unix:a b",
            "vhost-user:/a:b",
            "ublk",
            "ublk:12",
            "nodes",
            "nodes:192.0.2.1:40123",
        ] {
            let address: ExportAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            let json = serde_json::to_string(&address).unwrap();
            assert_eq!(serde_json::from_str::<ExportAddress>(&json).unwrap(), address);
        }
        for text in [
            "",
            "unix:",
            "vhost-user:",
            "/run/a.sock",
            "localhost:10809",
            "10809",
            "127.0.0.1",
            "ublk:",
            "ublk:-1",
            "nodes:",
            "nodes:7",
        ] {
            assert!(text.parse::<ExportAddress>().is_err(), "{text}");
        }
        let device = ExportAddress::Ublk(Some(3));
        assert!(device.is_meant_by(&ExportAddress::Ublk(None)) && device.is_meant_by(&device));
        assert!(!device.is_meant_by(&ExportAddress::Ublk(Some(4))));
    }

    #[test]
    fn a_certificate_is_for_clients_of_nbd_and_of_an_export() {
        let pki = hecaton_pki::testing::TestAuthority::in_scratch();
        let may = |text: &str, dir: PathBuf| {
            Exported {
                address: text.parse().unwrap(),
                read_only: false,
                tls: Some(dir),
                uring: false,
            }
            .check()
        };
        let own = pki.issue("e", Role::Export);
        may("127.0.0.1:10809", own.clone()).unwrap();
        may("unix:/a", own.clone()).unwrap();
        assert!(matches!(may("fuse:/a", own.clone()), Err(ExportError::NoTls(_))));
        assert!(matches!(may("ublk", own.clone()), Err(ExportError::NoTls(_))));
        assert!(matches!(may("vhost-user:/a", own), Err(ExportError::NoTls(_))));
        let wrong = may("unix:/a", pki.issue("n", Role::Node)).unwrap_err().to_string();
        assert!(wrong.contains("node `n`") && wrong.contains("--role export"), "{wrong}");
        let none = may("unix:/a", pki.scratch().join("none")).unwrap_err();
        assert!(matches!(none, ExportError::Certificate { .. }), "{none}");
    }

    #[test]
    fn a_file_alone_has_requests_through_io_uring() {
        let may = |text: &str| {
            let address = text.parse().unwrap();
            Exported { address, read_only: false, tls: None, uring: true }.check()
        };
        may("fuse:/a").unwrap();
        for text in ["127.0.0.1:0", "unix:/a", "vhost-user:/a", "ublk"] {
            assert!(matches!(may(text), Err(ExportError::NoUring(_))), "{text}");
        }
    }

    #[test]
    fn what_is_in_use_is_refused_and_what_a_killed_one_left_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let address = ExportAddress::Unix(dir.path().join("a.sock"));
        let first = Listener::bind(&address).unwrap();
        let error = Listener::bind(&address).unwrap_err();
        assert!(error.to_string().contains("a.sock"), "{error}");
        // As if its process was killed: nothing removes the file.
        let ExportAddress::Unix(path) = &address else { unreachable!() };
        let kept = path.with_extension("kept");
        std::fs::rename(path, &kept).unwrap();
        drop(first);
        std::fs::rename(&kept, path).unwrap();
        drop(Listener::bind(&address).unwrap());
        assert!(!path.exists());
        std::fs::write(path, "a file of somebody's").unwrap();
        assert!(Listener::bind(&address).is_err());
        assert!(path.exists());

        let taken = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let error = Listener::bind(&taken.address).unwrap_err();
        assert!(error.to_string().contains(&taken.address.to_string()), "{error}");
    }
}
