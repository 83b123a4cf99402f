//! The pager: gives one consumer (a program and what it forks) more memory than it has on its host.
//!
//! It holds the programs' userfaultfds. A fault is answered with zeros, from staging, or with a page
//! fetched from the space; when local memory runs short, pages leave in batches ahead of need.
//!
//! | module | what it is about |
//! |---|---|
//! | [`keeper`] | the process behind the pager, that holds what must not be lost |
//! | [`worker`] | the pager process: its threads, its beginning and end |
//! | [`serve`] | the fault loop: kernel messages and arriving pages |
//! | [`fault`], [`event`] | what is done about each of them |
//! | [`evict`], [`staging`] | making room |
//! | [`core`], [`tables`], [`space_pages`], [`state`] | where each page is, in memory that outlives the process |
//! | [`recover`] | taking over from a pager that died |
//! | [`guest`] | guest RAM of virtual machines |
//! | [`attach`], [`fork`], [`address_space`], [`helper`], [`remote`] | programs, their children, the thread in them that works for us, their memory |
//! | [`housekeeping`], [`node`], [`control`], [`stats`] | the outside |

mod address_space;
mod attach;
pub mod config;
mod control;
mod core;
mod event;
mod evict;
mod fault;
mod fork;
mod guest;
mod helper;
mod housekeeping;
mod keeper;
mod node;
mod recover;
mod remote;
mod serve;
mod space_pages;
mod staging;
mod state;
pub mod stats;
mod tables;
mod worker;

pub use config::{Donor, Guest, IN_FLIGHT_BYTES, MIN_LOCAL_BYTES, PagerConfig};
pub use stats::{Latency, Stats};

use hecaton_space::SpaceError;
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Why a pager ends otherwise than in peace.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// Less local memory than batches need.
    #[error("{0} bytes of local memory are too few: a pager works with {MIN_LOCAL_BYTES} or more")]
    LocalTooSmall(u64),
    /// A socket that cannot be listened on.
    #[error("cannot listen on {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The pool cannot be used.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The consumer was ended, because its memory could not be kept.
    #[error("the program was ended: {0}")]
    ConsumerEnded(String),
    /// The kernel refuses something that a pager needs.
    #[error(transparent)]
    System(#[from] std::io::Error),
}

/// Runs a pager in the calling process, which must have one thread, and which becomes its keeper.
/// Standard input is the launcher's: see [`PagerConfig`]. Says "ready" on standard output.
///
/// # Errors
/// See [`PagerError`].
pub fn run(config: &PagerConfig) -> Result<(), PagerError> {
    if config.local_bytes < MIN_LOCAL_BYTES {
        return Err(PagerError::LocalTooSmall(config.local_bytes));
    }
    let control_path = control_socket(&config.socket);
    let listener = listen(&config.socket, libc::SOCK_SEQPACKET)?;
    let control = listen(&control_path, libc::SOCK_STREAM)?;
    let state = state::State::create()?;
    let firecracker = match &config.guest {
        Some(Guest::Firecracker { socket, .. }) => Some(listen(socket, libc::SOCK_STREAM)?),
        _ => None,
    };
    let held = worker::Held { state, listener, control, launcher: 0, firecracker };
    let mut out = std::io::stdout();
    writeln!(out, "ready").and_then(|()| out.flush())?;

    let result = keeper::keep(|| match worker::run(config, held) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "the pager ends");
            if let PagerError::ConsumerEnded(_) = error { CONSUMER_ENDED } else { 1 }
        }
    });
    let _ = std::fs::remove_file(&config.socket);
    let _ = std::fs::remove_file(&control_path);
    if let Some(Guest::Firecracker { socket, .. }) = &config.guest {
        let _ = std::fs::remove_file(socket);
    }
    match result? {
        0 => Ok(()),
        CONSUMER_ENDED => Err(PagerError::ConsumerEnded("its last statistics say why".into())),
        status => Err(std::io::Error::other(format!("its worker ended with {status}")).into()),
    }
}

/// The worker's exit status when it had to end its consumer.
const CONSUMER_ENDED: i32 = 3;

/// The control socket of the pager whose programs attach at `socket`.
pub fn control_socket(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".ctl");
    path.into()
}

fn listen(path: &Path, kind: i32) -> Result<i32, PagerError> {
    let failed = |source| PagerError::Socket { path: path.to_owned(), source };
    let kind = match kind {
        libc::SOCK_SEQPACKET => rustix::net::SocketType::SEQPACKET,
        _ => rustix::net::SocketType::STREAM,
    };
    let bind = || -> Result<i32, rustix::io::Errno> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags};
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
        rustix::net::listen(&socket, 128)?;
        Ok(socket.into_raw_fd())
    };
    bind().map_err(|errno| failed(errno.into()))
}
