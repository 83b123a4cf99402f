//! The keeper: a process that opens files of the mount for programs, and has the kernel drop their
//! pages.
//!
//! Both wait for the pager. It is a process of its own, so that a pager that is killed can end, and
//! its successor can answer what is waited for. It knows nothing, and asks nobody but the kernel.
//! It ends when nobody has the other end of its connection any more: the pager is gone then, and so
//! is the node that would start another. Whatever still waits for an answer is given an error, by
//! ending the connection of the mount ([`Abort`]).

use crate::files::table::MAX_NAME;
use hecaton_fuse::wire::drop_pages;
use hecaton_uffd::files::{Answer, Ask, AskKind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, ftruncate, openat, statx, unlinkat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, accept_with, recv, recvmsg, send,
    sendmsg, socketpair, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Programs that are answered at a time; others wait.
const MAX_ASKING: usize = 256;

/// How long a program that has connected may take to ask.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the pager tells the keeper. It says the same when it has been done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Have a part of a file dropped from the page cache.
    Drop { node: u64, offset: u64, bytes: u64 },
    /// End.
    End,
}

impl Order {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn to_bytes(self) -> [u8; Order::BYTES] {
        let words = match self {
            Order::Drop { node, offset, bytes } => [node, offset, bytes],
            Order::End => [0; 3],
        };
        let mut to = [0; Order::BYTES];
        for (to, word) in to.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        to
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Order> {
        let bytes: &[u8; Order::BYTES] = bytes.try_into().ok()?;
        let word =
            |at: usize| u64::from_ne_bytes(bytes[at * 8..][..8].try_into().expect("eight bytes"));
        Some(match word(0) {
            0 => Order::End,
            node => Order::Drop { node, offset: word(1), bytes: word(2) },
        })
    }
}

/// Starts a keeper of this mount that answers programs at `listener`. Returns it, and the other end
/// of its connection.
pub(super) fn start(
    mount: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    listener: BorrowedFd<'_>,
) -> io::Result<(Child, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let child = Command::new("/proc/self/exe")
        .arg0("hecaton")
        .arg("file-keeper")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        // The group of a pager that is killed must end with it: see the node's children.
        .process_group(0)
        .spawn()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [mount, device, listener];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&ours, &[IoSlice::new(b"keep")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok((child, ours))
}

/// Runs a keeper in the calling process, whose standard input is its connection to the pager.
pub fn run() -> io::Result<()> {
    let line = io::stdin().as_fd().try_clone_to_owned()?;
    let [mount, device, listener] = receive_three(&line)?;
    rustix::process::umask(Mode::empty());
    let abort = Abort::of(&mount);
    let watched = line.try_clone()?;
    std::thread::Builder::new().name("end".into()).spawn(move || {
        wait_for_end(&watched);
        match abort {
            Ok(abort) => abort.now(),
            Err(error) => tracing::warn!(%error, "who waits for shared memory may wait for ever"),
        }
        std::process::exit(0);
    })?;
    let (mount, shared) = (Arc::new(mount), Arc::new(AtomicUsize::new(0)));
    lift_dirty_limit(&mount);
    let its_mount = Arc::clone(&mount);
    std::thread::Builder::new().name("programs".into()).spawn(move || {
        loop {
            answer_programs(&listener, &its_mount, &shared);
        }
    })?;
    let mut bytes = [0u8; Order::BYTES];
    loop {
        let read = match recv(&line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => return Ok(()),
        };
        let Some(order @ Order::Drop { node, offset, bytes }) = Order::parse(&bytes[..read]) else {
            return Ok(());
        };
        drop_part(&mount, &device, node, offset, bytes);
        if send(&line, &order.to_bytes(), SendFlags::NOSIGNAL).is_err() {
            return Ok(());
        }
    }
}

fn receive_three(line: &OwnedFd) -> io::Result<[OwnedFd; 3]> {
    let mut bytes = [0u8; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut part = [IoSliceMut::new(&mut bytes)];
    recvmsg(line, &mut part, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    fds.try_into().map_err(|_| io::Error::other("this command is started by a pager"))
}

/// Ends the connection of a mount to who serves it.
struct Abort(OwnedFd);

impl Abort {
    /// Prepared in advance: later, nothing may be asked of the mount.
    fn of(mount: &OwnedFd) -> io::Result<Abort> {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let none = MountAttrFlags::empty();
        let connections = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, none)?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let known = statx(mount, "", flags, StatxFlags::TYPE)?;
        let path = format!("{}/abort", known.stx_dev_minor);
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(Abort(openat(&connections, path, flags, Mode::empty())?))
    }

    fn now(&self) {
        // Fails when the mount has gone.
        let _ = rustix::io::write(&self.0, b"1");
    }
}

/// Waits until nobody has the other end of the connection.
fn wait_for_end(line: &OwnedFd) {
    loop {
        let mut polled = [PollFd::new(line, PollFlags::empty())];
        let waited = poll(&mut polled, None);
        if waited.is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            return;
        }
    }
}

/// Lets programs have more dirty pages than the kernel lets a file system of user space have: they
/// are counted by the pager, and are few.
fn lift_dirty_limit(mount: &OwnedFd) {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(known) = statx(mount, "", flags, StatxFlags::TYPE) else { return };
    let place = format!("/sys/class/bdi/{}:{}", known.stx_dev_major, known.stx_dev_minor);
    for (name, value) in [("strict_limit", "0"), ("max_ratio", "100")] {
        if let Err(error) = std::fs::write(format!("{place}/{name}"), value) {
            tracing::debug!(%error, name, "programs that write shared memory may be slowed down");
        }
    }
}

/// Has dirty pages written in large parts, and then all of it dropped.
fn drop_part(mount: &OwnedFd, device: &OwnedFd, node: u64, offset: u64, bytes: u64) {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    // Fails when the file has gone.
    if let Ok(file) = openat(mount, format!("#{node}"), flags, Mode::empty()) {
        // SAFETY: numbers only.
        let _ = unsafe {
            let (at, len) = (offset as i64, bytes as i64);
            libc::sync_file_range(file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
    let _ = rustix::io::write(device, &drop_pages(node, offset, bytes));
}

/// Takes the next program that connects, and answers it in a thread of its own.
fn answer_programs(listener: &OwnedFd, mount: &Arc<OwnedFd>, asking: &Arc<AtomicUsize>) {
    let accepted = accept_with(listener, SocketFlags::CLOEXEC);
    let Ok(program) = accepted else { return std::thread::sleep(Duration::from_millis(10)) };
    while asking.load(Relaxed) >= MAX_ASKING {
        std::thread::sleep(Duration::from_millis(1));
    }
    asking.fetch_add(1, Relaxed);
    let (mount, counted) = (Arc::clone(mount), Arc::clone(asking));
    let spawned = std::thread::Builder::new().spawn(move || {
        answer(&program, &mount);
        counted.fetch_sub(1, Relaxed);
    });
    if spawned.is_err() {
        // It finds the connection closed, and asks again.
        asking.fetch_sub(1, Relaxed);
    }
}

fn answer(program: &OwnedFd, mount: &OwnedFd) {
    let _ = sockopt::set_socket_timeout(program, sockopt::Timeout::Recv, Some(PATIENCE));
    let mut bytes = [0u8; size_of::<Ask>()];
    let Ok((read, _)) = recv(program, &mut bytes, RecvFlags::empty()) else { return };
    let Some(ask) = Ask::parse(&bytes[..read]) else { return };
    let Ok(peer) = sockopt::socket_peercred(program) else { return };
    let done = become_user(peer.uid.as_raw(), peer.gid.as_raw()).and_then(|()| {
        let user = peer.uid.as_raw();
        do_for(mount, &ask, user)
    });
    let answer = match &done {
        Ok(_) => Answer::of(0),
        Err(errno) => Answer::of(errno.raw_os_error()),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let file = done.ok().flatten();
    let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let parts = [IoSlice::new(answer.as_bytes())];
    // A program that has ended is not waited for.
    let _ = sendmsg(program, &parts, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Files that this thread makes are this user's.
fn become_user(user: u32, group: u32) -> Result<(), Errno> {
    // SAFETY: numbers only; both calls change the calling thread alone.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, group);
        libc::syscall(libc::SYS_setfsuid, user);
    }
    Ok(())
}

/// Does what a program asks for; what it opens is returned.
fn do_for(mount: &OwnedFd, ask: &Ask, user: u32) -> Result<Option<OwnedFd>, Errno> {
    let make = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let named = |prefix: String| {
        let mut name = prefix.into_bytes();
        name.extend_from_slice(ask.name());
        name.truncate(MAX_NAME);
        name
    };
    match ask.kind().ok_or(Errno::INVAL)? {
        AskKind::Anonymous => {
            let file = openat(mount, "shared:memory", make, Mode::from_raw_mode(0o600))?;
            ftruncate(&file, ask.bytes)?;
            Ok(Some(file))
        }
        AskKind::MemoryFile => {
            let name = named("memfd:".into());
            openat(mount, &name[..], make, Mode::from_raw_mode(0o777)).map(Some)
        }
        AskKind::Open => {
            let known = OFlags::ACCMODE | OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC;
            let flags = OFlags::from_bits_retain(ask.flags) & known;
            let name = named(format!("{user}:"));
            let mode = Mode::from_raw_mode(ask.mode & 0o7777);
            openat(mount, &name[..], flags | OFlags::CLOEXEC, mode).map(Some)
        }
        AskKind::Unlink => {
            unlinkat(mount, &named(format!("{user}:"))[..], AtFlags::empty()).map(|()| None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_as_they_were_written() {
        let drop = Order::Drop { node: 7, offset: 8192, bytes: 4096 };
        for order in [drop, Order::End] {
            assert_eq!(Order::parse(&order.to_bytes()), Some(order));
        }
        assert_eq!(Order::parse(&[1; 5]), None);
    }
}
