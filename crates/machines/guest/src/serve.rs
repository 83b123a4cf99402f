//! Where the API listens: Unix sockets, and loopback addresses.

use crate::bounded::Bounded;
use crate::sink::Address;
use axum::Router;
use rustix::io::Errno;
use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;

/// Lets a socket's owner and group connect.
const SOCKET_MODE: u32 = 0o660;

/// Why the API is not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Other hosts can reach the address, and any client could speak for an application.
    #[error(
        "{0} can be reached from other hosts, and nobody is authenticated; take a loopback address such as \
         127.0.0.1:7072, or unix:/PATH"
    )]
    Reachable(SocketAddr),
    /// A name, and no address.
    #[error(
        "`{0}` is no address to listen at; write unix:/PATH, or an IP address and a port such as 127.0.0.1:7072"
    )]
    Name(String),
    /// Somebody listens there.
    #[error("cannot listen at {0}: somebody does already; choose another address")]
    InUse(Address),
    /// The kernel refuses.
    #[error("cannot listen at {address}")]
    Listen {
        /// Where it should listen.
        address: Address,
        /// Error of the system call.
        source: io::Error,
    },
}

/// The API at one address.
#[derive(Debug)]
pub struct ApiServer {
    address: Address,
    /// Path of the Unix socket, which [`ApiServer::stop`] removes.
    path: Option<PathBuf>,
    serving: JoinHandle<io::Result<()>>,
}

impl ApiServer {
    /// Serves the routes there; port 0 takes a free one. To be called within a tokio runtime.
    pub async fn start(address: &Address, routes: Router) -> Result<ApiServer, ServeError> {
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::AddrInUse => ServeError::InUse(address.clone()),
            _ => ServeError::Listen { address: address.clone(), source },
        };
        match address {
            Address::Unix(path) => {
                let listener = bind(path).map_err(failed)?;
                let permissions = Permissions::from_mode(SOCKET_MODE);
                std::fs::set_permissions(path, permissions).map_err(failed)?;
                let serving =
                    tokio::spawn(async move { axum::serve(Bounded::new(listener), routes).await });
                Ok(ApiServer { address: address.clone(), path: Some(path.clone()), serving })
            }
            Address::Tcp(text) => {
                let at = loopback(text)?;
                let listener = TcpListener::bind(at).await.map_err(failed)?;
                let address = Address::Tcp(listener.local_addr().map_err(failed)?.to_string());
                // Pages in a browser of the guest's reach loopback, too.
                let routes = hecaton_web::guarded(routes, at, |_| false);
                let serving =
                    tokio::spawn(async move { axum::serve(Bounded::new(listener), routes).await });
                Ok(ApiServer { address, path: None, serving })
            }
        }
    }

    /// Whether it can be served there at all, before anything is started.
    pub fn check(address: &Address) -> Result<(), ServeError> {
        match address {
            Address::Unix(_) => Ok(()),
            Address::Tcp(text) => loopback(text).map(drop),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Stops. Requests that wait are cut.
    pub async fn stop(self) {
        if let Some(path) = &self.path {
            // Somebody may have removed it.
            let _ = std::fs::remove_file(path);
        }
        self.serving.abort();
        // An error says that it was aborted.
        let _ = self.serving.await;
    }
}

fn loopback(text: &str) -> Result<SocketAddr, ServeError> {
    let address: SocketAddr = text.parse().map_err(|_| ServeError::Name(text.to_owned()))?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(ServeError::Reachable(address)),
    }
}

/// Takes the place of a socket that a killed manager has left, and of nothing else.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let is_left = |path: &Path| {
        let is_socket = path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket());
        let refused = |error| Errno::from_io_error(&error) == Some(Errno::CONNREFUSED);
        is_socket && UnixStream::connect(path).is_err_and(refused)
    };
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_left(path) => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}
