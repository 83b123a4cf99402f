//! The pager: gives one consumer (a program and what it forks) more memory than it has on its host.
//!
//! It holds the programs' userfaultfds. A fault is answered with zeros, from staging, or with a page
//! fetched from the space; when local memory runs short, pages leave in batches ahead of need.
//!
//! | module | what it is about |
//! |---|---|
//! | [`guard`], [`adopt`], [`channel`] | what the node holds for the pager, and gives to the next one |
//! | [`adoption`], [`lifeline`] | how a child that has outlived its node is taken over by the next one |
//! | [`worker`] | the pager process: its threads, its beginning and end |
//! | [`serve`], [`source`] | the fault loop: kernel messages and arriving pages |
//! | [`fault`], [`event`] | what is done about each of them |
//! | [`evict`], [`take`], [`write_out`], [`staging`], [`give_back`] | making room; giving it back |
//! | [`target`] | what the consumer may hold of the pool |
//! | [`core`], [`shared`], [`tables`], [`space_pages`], [`state`] | where each page is, in memory that outlives the process |
//! | [`sealing`] | pages that donors can neither read nor alter |
//! | [`recover`], [`discover`] | taking over from a pager that died; pages that nobody has noted |
//! | [`guest`] | guest RAM of virtual machines |
//! | [`attach`], [`fork`], [`inherit`] | programs and their children come |
//! | [`address_space`], [`stage`], [`mappings`], [`helper`], [`remote`] | one program's memory, the thread in it that works for us |
//! | [`housekeeping`], [`node`], [`control`], [`stats`] | the outside |

mod address_space;
mod adopt;
pub mod adoption;
mod attach;
pub mod channel;
mod cold;
pub mod config;
mod control;
mod core;
mod discover;
mod event;
mod evict;
mod fault;
mod fork;
mod give_back;
mod guard;
mod guest;
mod helper;
mod housekeeping;
mod inherit;
mod lifeline;
mod mappings;
mod node;
pub mod placement;
mod recover;
mod remote;
mod scrub;
mod sealing;
mod serve;
mod shared;
mod source;
mod space_pages;
mod stage;
mod staging;
mod state;
pub mod stats;
mod tables;
mod take;
mod target;
mod worker;
mod write_out;

pub use config::{
    Donor, Guest, IN_FLIGHT_BYTES, MIN_LOCAL_BYTES, PagerConfig, PagerEvent, PagerLeft, PagerOrder,
    PagerStart,
};
pub use hecaton_policy::site::Site;
pub use hecaton_space::{COPYING_BYTES_PER_S, Cold, FAILOVER, SCRUB_BYTES_PER_S};
pub use placement::{DonorUse, Placement, PoolUse, RamRange};
pub use stats::{Latency, Stats};
pub use worker::{PANICKED, end_on_panic};

use hecaton_space::SpaceError;
use rustix::net::SocketType;
use std::io::Write;
use std::os::fd::{AsFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// The process was not started by a node.
    #[error("this command is started by `hecaton node`, with a socket to it as standard input")]
    NotStarted,
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

/// Runs a pager in the calling process. Standard input is a socket to the node, which says what the
/// pager is to be: see [`config`]. Says "ready" on standard output.
///
/// # Errors
/// See [`PagerError`].
pub fn run() -> Result<(), PagerError> {
    let node = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut receiver = channel::Receiver::new(node.try_clone()?.into());
    let (config, held) = receive_start(&mut receiver)?;
    let guard = Arc::new(guard::Guard::new(node.into_raw_fd())?);
    page(&config, held, &guard, receiver).inspect_err(|error| guard.say_why(error))
}

/// What the pager is to be, and what the pager before it had handed over.
fn receive_start(
    receiver: &mut channel::Receiver,
) -> Result<(PagerConfig, adopt::Labelled), PagerError> {
    let start: Option<PagerStart> = receiver.receive().unwrap_or_default();
    let PagerStart { config, held: count } = start.ok_or(PagerError::NotStarted)?;
    let mut held = Vec::new();
    while held.len() < count {
        let labels: Vec<String> = receiver.receive()?.ok_or(PagerError::NotStarted)?;
        let fds = receiver.take_fds(labels.len())?;
        held.extend(labels.into_iter().zip(fds));
    }
    Ok((config, held))
}

fn page(
    config: &PagerConfig,
    held: adopt::Labelled,
    guard: &Arc<guard::Guard>,
    receiver: channel::Receiver,
) -> Result<(), PagerError> {
    if config.local_bytes < MIN_LOCAL_BYTES {
        return Err(PagerError::LocalTooSmall(config.local_bytes));
    }
    let control_path = control_socket(&config.socket);
    let held = if held.is_empty() {
        let listener = listen(&config.socket, SocketType::SEQPACKET)?;
        let control = listen(&control_path, SocketType::STREAM)?;
        let state = state::State::create()?;
        let firecracker = match &config.guest {
            Some(Guest::Firecracker { socket, .. }) => Some(listen(socket, SocketType::STREAM)?),
            _ => None,
        };
        let held = worker::Held { state, listener, control, firecracker, lost: false };
        let (labels, fds): (_, Vec<RawFd>) = held.labelled().into_iter().unzip();
        guard.hold(labels, &fds);
        held
    } else {
        let (held, strays) = adopt::adopt(held)?;
        for strays in strays.chunks(channel::MAX_FDS_PER_LINE) {
            guard.release_labels(strays.to_vec());
        }
        held
    };
    let adoption = config.outlive.as_ref().map(adoption::AdoptionSocket::listen).transpose()?;
    let mut out = std::io::stdout();
    writeln!(out, "ready").and_then(|()| out.flush())?;

    let ways = worker::NodeWays { guard: guard.clone(), receiver, adoption };
    let ended = worker::run(config, held, ways);
    let _ = std::fs::remove_file(&config.socket);
    let _ = std::fs::remove_file(&control_path);
    if let Some(Guest::Firecracker { socket, .. }) = &config.guest {
        let _ = std::fs::remove_file(socket);
    }
    if let Some(outlive) = &config.outlive {
        // The thread that listens at it is not waited for.
        let _ = std::fs::remove_file(&outlive.socket);
    }
    ended.inspect(|()| guard.say_over())
}

/// The control socket of the pager whose programs attach at `socket`.
pub fn control_socket(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".ctl");
    path.into()
}

fn listen(path: &Path, kind: SocketType) -> Result<RawFd, PagerError> {
    let failed = |source| PagerError::Socket { path: path.to_owned(), source };
    let bind = || -> Result<RawFd, rustix::io::Errno> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags};
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
        rustix::net::listen(&socket, 128)?;
        Ok(socket.into_raw_fd())
    };
    bind().map_err(|errno| failed(errno.into()))
}
