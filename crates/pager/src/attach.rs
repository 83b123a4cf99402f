//! Programs and forked children come.

use crate::address_space::{AddressSpace, Helper, process_of_thread};
use crate::core::{Core, Shared, close};
use crate::guest;
use crate::remote;
use crate::serve::Server;
use crate::state::entry::{Entry, Place};
use crate::tables::Key;
use hecaton_policy::evict::Installed;
use hecaton_uffd::handover::{Attach, MAGIC, Range, Welcome};
use hecaton_uffd::{Uffd, guest_ram};
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};

/// A forked child that has said so, and whose userfaultfd is not recognised yet.
pub(crate) struct Pending {
    pid: i32,
    socket: RawFd,
    area: u64,
    own: Range,
}

/// The next connection, if there is one.
pub(crate) fn accept(listener: RawFd) -> Option<RawFd> {
    let flags = libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for.
    let fd = unsafe { libc::accept4(listener, std::ptr::null_mut(), std::ptr::null_mut(), flags) };
    (fd >= 0).then_some(fd)
}

/// A newcomer has something to say.
pub(crate) fn receive(server: &mut Server, shared: &Shared, socket: RawFd) {
    let refuse = |why: &str, uffd: Option<RawFd>| {
        tracing::warn!(why, "a program is refused");
        close(socket);
        uffd.into_iter().for_each(close);
    };
    let Some(Message { bytes, fds }) = receive_message(socket) else {
        return refuse("it hung up, or said more than there is to say", None);
    };
    if let Some(handover) = guest_ram::Handover::parse(&bytes) {
        return guest::handover::begin(server, shared, socket, &handover, fds);
    }
    let Some((attach, uffd)) = parse_attach(&bytes, fds) else {
        return refuse("what it says is not an attach message", None);
    };
    if attach.magic != MAGIC {
        return refuse("its libhecaton.so is of another version", uffd);
    }
    match uffd {
        Some(fd) if attach.forked == 0 => {
            if let Err(why) = fresh(server, shared, socket, &attach, Uffd(fd)) {
                refuse(why, Some(fd));
            }
        }
        None if attach.forked == 1 => {
            let Some(pid) = peer(socket) else { return refuse("its process cannot be told", None) };
            let Attach { area, own, .. } = attach;
            forked(server, &mut shared.lock(), Pending { pid, socket, area, own });
        }
        uffd => refuse("a userfaultfd is missing, or is one too many", uffd),
    }
}

fn fresh(
    server: &Server,
    shared: &Shared,
    socket: RawFd,
    attach: &Attach,
    uffd: Uffd,
) -> Result<(), &'static str> {
    let pid = peer(socket).ok_or("its process cannot be told")?;
    if !is_readable(pid, &attach.own) {
        return Err(
            "its memory may not be read by the pager: run both as the same user, and check \
                    kernel.yama.ptrace_scope",
        );
    }
    let mut space = AddressSpace::new(uffd);
    space.pid = Some(pid);
    space.helper = Some(Helper { socket, area: attach.area, own: attach.own });
    space.charged = true;
    let mut guard = shared.lock();
    let core = &mut *guard;
    let index = core.add_space(space).ok_or("too many programs on one pager")?;
    let ranges = attach.ranges.iter().take(attach.range_count as usize);
    for range in ranges {
        core.spaces[index].as_mut().expect("just added").remember_registered(*range);
        core.adopt_pages(index, *range).map_err(|_| "its pages cannot be listed")?;
    }
    drop(guard);
    server.watch_space(index, uffd, Some(socket));
    welcome(socket, None).then_some(()).ok_or("it hung up")
}

impl Core {
    /// Takes note of pages that were in memory before the range was registered.
    pub(crate) fn adopt_pages(&mut self, index: usize, range: Range) -> std::io::Result<()> {
        let (first, count) = (range.start >> 12, (range.len >> 12) as usize);
        let space = self.spaces[index].as_mut().expect("named by the caller");
        let mapped = space.mapped(first, count)?;
        for (i, page) in mapped.iter().enumerate() {
            let key = Key::new(index, first + i as u64);
            if page.present && self.get(key) == Entry::ZERO {
                self.set(key, Entry::ZERO.with_place(Place::Resident).with_dirty(true));
                self.count_in(key, Installed::Demand);
            }
        }
        Ok(())
    }
}

/// A thread has faulted in an address space whose process is not known: a forked child's.
pub(crate) fn recognise(server: &mut Server, core: &mut Core, index: usize, thread: u32) {
    let Some(pid) = process_of_thread(thread) else { return };
    let space = core.spaces[index].as_mut().expect("it has just faulted");
    space.pid = Some(pid);
    space.save(&core.state, index);
    if let Some(at) = server.pending.iter().position(|pending| pending.pid == pid) {
        let pending = server.pending.swap_remove(at);
        bind(server, core, index, &pending);
    }
}

/// A forked child has said that it is there. Its fault at the doorbell may have been read before.
fn forked(server: &mut Server, core: &mut Core, pending: Pending) {
    let is_its = |space: &AddressSpace| space.pid == Some(pending.pid) && space.helper.is_none();
    let known = core.live_spaces().find(|(_, space)| is_its(space)).map(|(index, _)| index);
    match known {
        Some(index) => bind(server, core, index, &pending),
        None => server.pending.push(pending),
    }
}

fn bind(server: &Server, core: &mut Core, index: usize, pending: &Pending) {
    let &Pending { socket, area, own, .. } = pending;
    let space = core.spaces[index].as_mut().expect("chosen by the caller");
    space.helper = Some(Helper { socket, area, own });
    let uffd = space.uffd;
    space.save(&core.state, index);
    if server.watch_helper(index, socket).is_err() || !welcome(socket, Some(uffd.0)) {
        core.end_space(index);
    }
}

fn welcome(socket: RawFd, uffd: Option<RawFd>) -> bool {
    // SAFETY: getppid cannot fail. The keeper is the parent; it, and each worker it starts, may
    // read the program.
    let reader = unsafe { libc::getppid() };
    let message = Welcome { magic: MAGIC, reader };
    // SAFETY: a `repr(C)` structure of integers without padding.
    let bytes = unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(&message).cast::<u8>(), size_of::<Welcome>())
    };
    let part = std::io::IoSlice::new(bytes);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    // SAFETY: both descriptors are open.
    let (socket, uffd) = unsafe {
        use std::os::fd::BorrowedFd;
        (BorrowedFd::borrow_raw(socket), uffd.map(|fd| [BorrowedFd::borrow_raw(fd)]))
    };
    if let Some(uffd) = &uffd {
        ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(uffd));
    }
    let flags = rustix::net::SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[part], &mut ancillary, flags).is_ok()
}

/// One packet, and the descriptors that came with it.
pub(crate) struct Message {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Most descriptors that any message brings.
const MAX_DESCRIPTORS: usize = 2;

/// The packet that waits in `socket`. `None` if the peer has hung up, or the packet is larger than
/// any message, or brings more descriptors.
pub(crate) fn receive_message(socket: RawFd) -> Option<Message> {
    use rustix::net::{RecvAncillaryMessage, RecvFlags, ReturnFlags};
    let mut bytes = vec![0u8; size_of::<Attach>()];
    let mut space =
        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let received = {
        let mut part = [std::io::IoSliceMut::new(&mut bytes)];
        // SAFETY: the socket is open.
        let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(socket) };
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        rustix::net::recvmsg(socket, &mut part, &mut ancillary, flags).ok()?
    };
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 || received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return None;
    }
    bytes.truncate(received.bytes);
    Some(Message { bytes, fds })
}

fn parse_attach(bytes: &[u8], fds: Vec<OwnedFd>) -> Option<(Attach, Option<RawFd>)> {
    if bytes.len() != size_of::<Attach>() || fds.len() > 1 {
        return None;
    }
    // SAFETY: the length was compared, and any bytes are a valid Attach.
    let attach = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Attach>()) };
    Some((attach, fds.into_iter().next().map(IntoRawFd::into_raw_fd)))
}

pub(crate) fn peer(socket: RawFd) -> Option<i32> {
    // SAFETY: the socket is open.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(socket) };
    let credentials = rustix::net::sockopt::socket_peercred(socket).ok()?;
    Some(credentials.pid.as_raw_nonzero().get())
}

/// Tries to read one byte of the library's own memory: the helper's stack, which is never paged,
/// so that the read cannot wait for a fault of ours.
fn is_readable(pid: i32, own: &Range) -> bool {
    let mut byte = 0u8;
    let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let from = libc::iovec { iov_base: (own.start + 4096) as *mut _, iov_len: 1 };
    // SAFETY: one byte is written to `byte`.
    unsafe { remote::read(pid, &[to], &[from]) }
}
