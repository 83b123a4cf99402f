//! Opens files for programs and evicts cached pages, in its own process.
//!
//! Both wait for the pager. A process that waits for its own file system cannot be killed: so the
//! keeper is not part of the pager. A killed pager ends, and its successor answers the requests.
//!
//! The keeper has no state. It ends on [`Order::End`], or when no process has the other end of its
//! connection. If the node had it ([`Order::Held`]), pager and node are gone then, and the keeper
//! aborts the connection of the mount ([`abort`]). If not, the pager was killed before it had
//! handed the connection to the node, and its successor starts another keeper.
//!
//! | module | does |
//! |---|---|
//! | [`messages`] | encodes what pager and keeper say to each other |
//! | [`programs`] | answers programs |
//! | [`evict`] | evicts pages |
//! | [`names`] | opens files so that the kernel forgets their names |
//! | [`abort`] | aborts the connection of the mount |

mod abort;
mod evict;
pub(super) mod messages;
mod names;
mod programs;

use abort::Abort;
use messages::{MAX_BYTES, Order, Report};
use names::Mount;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, send, sendmsg,
    socketpair,
};
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Set by [`Order::Held`].
static IS_HELD: AtomicBool = AtomicBool::new(false);

/// What a keeper works with.
pub(super) struct Ways<'a> {
    /// Root of the mount.
    pub(super) directory: BorrowedFd<'a>,
    /// `/dev/fuse`.
    pub(super) device: BorrowedFd<'a>,
    /// Where programs ask.
    pub(super) listener: BorrowedFd<'a>,
    /// Socket of the programs' pager.
    pub(super) programs: &'a Path,
}

/// Starts a keeper. Returns its process, and the pager's end of the connection.
pub(super) fn start(ways: &Ways<'_>) -> io::Result<(Child, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let child = Command::new("/proc/self/exe")
        .arg0("hecaton")
        .arg("file-keeper")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        // The node waits until the pager's process group has ended, and the keeper outlives it.
        .process_group(0)
        .spawn()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [ways.directory, ways.device, ways.listener];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let programs = [IoSlice::new(ways.programs.as_os_str().as_bytes())];
    sendmsg(&ours, &programs, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok((child, ours))
}

/// Runs the keeper in this process. Standard input is the connection to the pager.
pub fn run() -> io::Result<()> {
    let line = io::stdin().as_fd().try_clone_to_owned()?;
    let (programs, [directory, device, listener]) = receive_ways(&line)?;
    rustix::process::umask(rustix::fs::Mode::empty());
    end_with(line.try_clone()?, Abort::of(&directory))?;
    let mount = Arc::new(Mount { directory, device });
    let evictor = evict::Evictor::new(Arc::clone(&mount), programs)?;
    std::thread::Builder::new()
        .name("programs".into())
        .spawn(move || programs::answer_all(&listener, &mount))?;
    let mut bytes = [0u8; MAX_BYTES];
    loop {
        let read = match recv(&line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => 0,
        };
        match Order::parse(&bytes[..read]) {
            Some(Order::Drop(runs)) => {
                let reports = Report::all_to_bytes(&evictor.evict(&runs));
                // An error means that the connection has ended.
                let _ = send(&line, &reports, SendFlags::NOSIGNAL);
            }
            Some(Order::Held) => IS_HELD.store(true, SeqCst),
            Some(Order::End) => return Ok(()),
            // The connection has ended: the thread "end" ends the process.
            None => loop {
                std::thread::park();
            },
        }
    }
}

/// Ends the process when no process has the other end of the connection.
fn end_with(line: OwnedFd, abort: io::Result<Abort>) -> io::Result<()> {
    let wait = move || {
        wait_for_end(&line);
        match abort {
            _ if !was_held(&line) => {}
            Ok(abort) => abort.now(),
            Err(error) => tracing::warn!(%error, "cannot abort the mount; programs may hang"),
        }
        std::process::exit(0);
    };
    std::thread::Builder::new().name("end".into()).spawn(wait).map(drop)
}

/// Whether the node had the other end of the connection. The order that says so may not be read
/// yet: the other thread may be waiting for the pager.
fn was_held(line: &OwnedFd) -> bool {
    let mut bytes = [0u8; MAX_BYTES];
    while let Ok((read, _)) = recv(line, &mut bytes, RecvFlags::DONTWAIT)
        && let Some(order) = Order::parse(&bytes[..read])
    {
        if order == Order::Held {
            return true;
        }
    }
    IS_HELD.load(SeqCst)
}

fn receive_ways(line: &OwnedFd) -> io::Result<(PathBuf, [OwnedFd; 3])> {
    let mut bytes = [0u8; 256];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut part = [IoSliceMut::new(&mut bytes)];
    let read = recvmsg(line, &mut part, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let none = |_| io::Error::other("no mount on stdin; a pager starts this command");
    let fds = fds.try_into().map_err(none)?;
    Ok((OsString::from_vec(bytes[..read].to_vec()).into(), fds))
}

/// Waits until no process has the other end of the connection.
fn wait_for_end(line: &OwnedFd) {
    loop {
        let mut polled = [PollFd::new(line, PollFlags::empty())];
        let waited = poll(&mut polled, None);
        if waited.is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            return;
        }
    }
}
