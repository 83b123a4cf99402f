//! Programs come.

use crate::core::{Core, close};
use crate::guest;
use crate::guest::handover::is_userfaultfd;
use crate::process::guard::{helper_label, uffd_label};
use crate::programs::address_space::AddressSpace;
use crate::programs::fork::{self, ForkRequest};
use crate::programs::helper::Helper;
use crate::programs::remote;
use crate::programs::stage::Stage;
use crate::serve::Server;
use crate::shared::Shared;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::handover::{Answer, Attach, Kind, MAGIC, Range, Step};
use hecaton_uffd::{Uffd, guest_ram};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};

/// An attach message from a connection.
pub(crate) struct MessageFrom {
    pub(crate) attach: Attach,
    pub(crate) uffd: Option<RawFd>,
    /// The process that said it, which need not be the one that made the connection. `None` for one
    /// that this process has no number for.
    pub(crate) pid: Option<i32>,
}

/// The next connection, if there is one.
pub(crate) fn accept(listener: RawFd) -> Option<RawFd> {
    let flags = libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for.
    let fd = unsafe { libc::accept4(listener, std::ptr::null_mut(), std::ptr::null_mut(), flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: just opened.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    // With each message comes who sent it: a child speaks on a connection of its parent's.
    if let Err(error) = rustix::net::sockopt::set_socket_passcred(socket, true) {
        tracing::warn!(%error, "a program's process cannot be told");
    }
    Some(fd)
}

/// A newcomer has something to say.
pub(crate) fn newcomer(server: &mut Server, shared: &Shared, socket: RawFd) {
    let refuse = |why: &str, uffd: Option<RawFd>| {
        tracing::warn!(why, "a program is refused");
        // An error means that it has ended.
        let _ = say(socket, Step::Refused);
        close(socket);
        uffd.into_iter().for_each(close);
    };
    let Ok(Some(message)) = receive_message(socket) else {
        return refuse("it hung up, or said more than there is to say", None);
    };
    if let Some(handover) = guest_ram::Handover::parse(&message.bytes) {
        return guest::handover::begin(server, shared, socket, &handover, message.fds);
    }
    let Ok(MessageFrom { attach, uffd, .. }) = parse_attach(message) else {
        return refuse("what it says is not an attach message", None);
    };
    let Some(pid) = peer(socket) else {
        return refuse("its process cannot be told", uffd);
    };
    match uffd {
        Some(fd) if attach.kind == Kind::Program as u32 => {
            if let Err(why) = fresh(server, shared, socket, pid, &attach, Uffd(fd)) {
                refuse(why, Some(fd));
            }
        }
        None if attach.kind == Kind::Fork as u32 => {
            let ranges = attach.ranges.iter().take(attach.range_count as usize);
            let written = ranges.map(|range| range.start / PAGE_SIZE as u64).collect();
            fork::requested(server, shared, ForkRequest { pid, connection: socket, written });
        }
        uffd => refuse("a userfaultfd is missing, or is one too many", uffd),
    }
}

/// Why a program whose memory cannot be copied out is not served.
pub(crate) const UNREADABLE: &str = "its memory may not be read by the pager: run both as the same \
    user, and check kernel.yama.ptrace_scope";

fn fresh(
    server: &mut Server,
    shared: &Shared,
    socket: RawFd,
    pid: i32,
    attach: &Attach,
    uffd: Uffd,
) -> Result<(), &'static str> {
    if !is_readable(pid, &attach.own) {
        return Err(UNREADABLE);
    }
    let mut guard = shared.lock();
    let core = &mut *guard;
    if core.failed.is_some() {
        return Err("its consumer is being ended");
    }
    // A process has one address space: what it had before, it has left by `exec`, or what had its
    // number has ended.
    let left: Vec<usize> = core
        .live_spaces()
        .filter(|(_, space)| space.pid == Some(pid))
        .map(|(index, _)| index)
        .collect();
    left.into_iter().for_each(|index| core.end_space(index));
    let mut space = AddressSpace::new(uffd, Helper::of(attach, socket));
    space.pid = Some(pid);
    space.charged = true;
    let index = core.add_space(space).ok_or("too many programs on one pager")?;
    let ranges = attach.ranges.iter().take(attach.range_count as usize);
    for range in ranges {
        core.spaces[index].as_mut().expect("just added").remember_registered(*range);
        if let Err(error) = core.discover_pages(index, *range) {
            tracing::debug!(%error, "a program ended while it attached");
            core.end_space(index);
            return Ok(());
        }
    }
    core.hold_and_welcome(index);
    drop(guard);
    fork::begin_to_serve(server, shared, index);
    Ok(())
}

impl Core {
    /// All is done for an address space. The node has its descriptors before the other side hears
    /// of it.
    pub(crate) fn hold_and_welcome(&mut self, index: usize) {
        let space = self.spaces[index].as_mut().expect("named by the caller");
        let socket = space.helper.expect("it has just attached").socket;
        let labels = vec![uffd_label(space.serial), helper_label(space.serial)];
        self.guard.hold(labels, &[space.uffd.0, socket]);
        space.advance(&self.state, index, Stage::Welcoming);
    }
}

/// Says `step` to who waits for it.
pub(crate) fn say(socket: RawFd, step: Step) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    rustix::net::send(socket, Answer::new(step).as_bytes(), flags).map(drop)
}

/// One packet.
pub(crate) struct Message {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// See [`MessageFrom`].
    pid: Option<i32>,
}

/// Most descriptors that any message brings.
const MAX_DESCRIPTORS: usize = 2;

/// The packet that waits in `socket`; `Ok(None)` if none does. An error if the peer has hung up, or
/// the packet is larger than any message, or brings more descriptors.
pub(crate) fn receive_message(socket: RawFd) -> std::io::Result<Option<Message>> {
    use rustix::net::{RecvAncillaryMessage, RecvFlags, ReturnFlags};
    let mut bytes = vec![0u8; size_of::<Attach>()];
    let space = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS), ScmCredentials(1));
    let mut space = vec![std::mem::MaybeUninit::uninit(); space];
    let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let received = {
        let mut part = [std::io::IoSliceMut::new(&mut bytes)];
        // SAFETY: the socket is open.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(socket, &mut part, &mut ancillary, flags) {
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            result => result?,
        }
    };
    let (mut fds, mut pid) = (Vec::new(), None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            RecvAncillaryMessage::ScmCredentials(who) => {
                pid = Some(who.pid.as_raw_nonzero().get());
            }
            _ => {}
        }
    }
    if received.bytes == 0 {
        return Err(std::io::Error::other("it has ended"));
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(std::io::Error::other("it says more than there is to say"));
    }
    bytes.truncate(received.bytes);
    Ok(Some(Message { bytes, fds, pid }))
}

/// Receives an attach message. `Ok(None)` if no message is there; an error if the connection has
/// ended or the message is not understood.
pub(crate) fn receive(socket: RawFd) -> std::io::Result<Option<MessageFrom>> {
    receive_message(socket)?.map(parse_attach).transpose()
}

fn parse_attach(message: Message) -> std::io::Result<MessageFrom> {
    let Message { bytes, fds, pid } = message;
    if bytes.len() == size_of::<Attach>() && fds.len() <= 1 {
        // SAFETY: the length was compared, and any bytes are a valid Attach.
        let attach = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Attach>()) };
        if !fds.iter().all(is_userfaultfd) {
            return Err(std::io::Error::other("what came with it is no userfaultfd"));
        }
        // Reading it is not to wait, whoever has opened it.
        let set = |fd: &OwnedFd| rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK);
        fds.iter().try_for_each(set)?;
        if attach.magic == MAGIC {
            let uffd = fds.into_iter().next().map(IntoRawFd::into_raw_fd);
            return Ok(MessageFrom { attach, uffd, pid });
        }
    }
    Err(std::io::Error::other("its libhecaton.so is of another version"))
}

pub(crate) fn peer(socket: RawFd) -> Option<i32> {
    // SAFETY: the socket is open.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let credentials = rustix::net::sockopt::socket_peercred(socket).ok()?;
    Some(credentials.pid.as_raw_nonzero().get())
}

/// Tries to read one byte of the library's own memory: the helper's stack, which is never paged,
/// so that the read cannot wait for a fault of ours.
pub(crate) fn is_readable(pid: i32, own: &Range) -> bool {
    let mut byte = 0u8;
    let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let from = libc::iovec { iov_base: (own.start + 4096) as *mut _, iov_len: 1 };
    // SAFETY: one byte is written to `byte`.
    unsafe { remote::read(pid, &[to], &[from]) }
}
