//! The pager: gives one consumer (a program and what it forks) more memory than it has on its host.
//!
//! It holds the programs' userfaultfds. A fault is answered with zeros, from staging, or with a
//! page fetched from the space; when local memory runs short, pages leave in batches ahead of need.
//!
//! | module | does |
//! |---|---|
//! | [`serve`] | runs the fault loop: kernel messages and arriving pages |
//! | [`fault`] | resolves faults, and follows what programs do to their mappings |
//! | [`evict`] | makes room: takes pages, stages them, writes them out |
//! | [`core`], [`shared`], [`state`] | hold page places, in memory that outlives the process |
//! | [`programs`] | attaches programs, follows their forks, talks to the helper of each |
//! | [`guest`] | pages the RAM of virtual machines |
//! | [`pool`] | decides how the pool holds the memory: donors, cold segments, scrubbing, target |
//! | [`recover`] | takes over from a pager that died |
//! | [`process`] | runs the process: threads, descriptors that the node holds, the node's orders |
//! | [`config`], [`stats`], [`error`] | what a pager is told, what it counts, and why it fails |

pub mod config;
mod core;
mod error;
mod evict;
mod fault;
mod guest;
mod pool;
mod process;
mod programs;
mod recover;
mod serve;
mod shared;
mod state;
pub mod stats;

pub use config::{
    Donor, Guest, IN_FLIGHT_BYTES, MIN_LOCAL_BYTES, PagerConfig, PagerEvent, PagerLeft, PagerOrder,
    PagerStart,
};
pub use error::PagerError;
pub use hecaton_policy::site::Site;
pub use hecaton_space::{COPYING_BYTES_PER_S, Cold, FAILOVER, SCRUB_BYTES_PER_S};
pub use pool::placement::{self, DonorUse, Placement, PoolUse, RamRange};
pub use process::worker::{PANICKED, end_on_panic};
pub use process::{adoption, channel};
pub use stats::{Latency, Outside, Stats};

use rustix::net::SocketType;
use std::io::Write;
use std::os::fd::{AsFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Runs a pager in the calling process. Standard input is a socket to the node, which says what the
/// pager is to be: see [`config`]. Says "ready" on standard output.
///
/// # Errors
/// See [`PagerError`].
pub fn run() -> Result<(), PagerError> {
    let node = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut receiver = process::channel::Receiver::new(node.try_clone()?.into());
    let (config, held) = receive_start(&mut receiver)?;
    let guard = Arc::new(process::guard::Guard::new(node.into_raw_fd())?);
    page(&config, held, &guard, receiver).inspect_err(|error| guard.say_why(error))
}

/// Receives the pager's configuration, and the descriptors that its predecessor had handed over.
fn receive_start(
    receiver: &mut process::channel::Receiver,
) -> Result<(PagerConfig, process::adopt::Labelled), PagerError> {
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
    held: process::adopt::Labelled,
    guard: &Arc<process::guard::Guard>,
    receiver: process::channel::Receiver,
) -> Result<(), PagerError> {
    if config.local_bytes < MIN_LOCAL_BYTES {
        return Err(PagerError::LocalTooSmall(config.local_bytes));
    }
    let control_path = control_socket(&config.socket);
    let held = if held.is_empty() {
        let listener = listen(&config.socket, SocketType::SEQPACKET)?;
        let public = process::admission::listen(config);
        let control = listen(&control_path, SocketType::STREAM)?;
        let state = state::State::create()?;
        let firecracker = match &config.guest {
            Some(Guest::Firecracker { socket, .. }) => Some(listen(socket, SocketType::STREAM)?),
            _ => None,
        };
        let lost = false;
        let held = process::worker::Held { state, listener, public, control, firecracker, lost };
        let (labels, fds): (_, Vec<RawFd>) = held.labelled().into_iter().unzip();
        guard.hold(labels, &fds);
        held
    } else {
        let (held, strays) = process::adopt::adopt(held)?;
        for strays in strays.chunks(process::channel::MAX_FDS_PER_LINE) {
            guard.release_labels(strays.to_vec());
        }
        held
    };
    let adoption =
        config.outlive.as_ref().map(process::adoption::AdoptionSocket::listen).transpose()?;
    let mut out = std::io::stdout();
    writeln!(out, "ready").and_then(|()| out.flush())?;

    let ways = process::worker::NodeWays { guard: guard.clone(), receiver, adoption };
    let ended = process::worker::run(config, held, ways);
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
