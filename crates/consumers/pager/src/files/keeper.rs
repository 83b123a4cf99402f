//! Opens files for programs and invalidates cached pages, in its own process.
//!
//! Both wait for the pager. A process that waits for its own file system cannot be killed: so the
//! keeper is not part of the pager. A killed pager ends, and its successor answers the requests.
//!
//! The keeper has no state. It ends on [`Order::End`], or when pager and node are gone: no process
//! has the other end of its connection then. In the second case it aborts the connection of the
//! mount ([`Abort`]), so that processes that wait for an answer get an error.

use crate::files::table::MAX_NAME;
use hecaton_fuse::wire::drop_pages;
use hecaton_memory::PAGE_SIZE;
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

/// Programs that are answered at a time, by one thread each. Others wait.
const MAX_ASKING: usize = 256;

/// Time for a program to send its question after it has connected.
const PATIENCE: Duration = Duration::from_secs(5);

/// A part of a file: inode number, and range in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) node: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// From the pager to the keeper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Invalidate this part. [`Report`]s answer the order.
    Drop(Part),
    /// End, once the earlier orders are done.
    End,
}

/// From the keeper to the pager: the outcome of an order, or of a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Report {
    pub(crate) part: Part,
    /// The kernel has kept the pages, because they are pinned, or in use again.
    pub(crate) is_kept: bool,
}

/// Bytes of an order, and of a report.
pub(crate) const MESSAGE_BYTES: usize = 24;

/// In the first word of a report.
const KEPT: u64 = 1 << 63;

impl Part {
    fn to_bytes(self, flag: u64) -> [u8; MESSAGE_BYTES] {
        let mut to = [0; MESSAGE_BYTES];
        for (to, word) in to.chunks_exact_mut(8).zip([self.node | flag, self.offset, self.bytes]) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        to
    }

    fn parse(bytes: &[u8]) -> Option<(Part, u64)> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let word =
            |at: usize| u64::from_ne_bytes(bytes[at * 8..][..8].try_into().expect("eight bytes"));
        let [first, offset, bytes] = [0, 1, 2].map(word);
        Some((Part { node: first & !KEPT, offset, bytes }, first & KEPT))
    }
}

impl Order {
    pub(crate) fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Order::Drop(part) => part.to_bytes(0),
            Order::End => [0; MESSAGE_BYTES],
        }
    }

    fn parse(bytes: &[u8]) -> Option<Order> {
        let (part, _) = Part::parse(bytes)?;
        Some(if part.node == 0 { Order::End } else { Order::Drop(part) })
    }
}

impl Report {
    fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        self.part.to_bytes(if self.is_kept { KEPT } else { 0 })
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Report> {
        let (part, flag) = Part::parse(bytes)?;
        Some(Report { part, is_kept: flag != 0 })
    }
}

/// Starts a keeper that answers programs at `listener`. Returns its process, and the pager's end of
/// the connection.
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
        // The node waits until the pager's process group has ended, and the keeper outlives it.
        .process_group(0)
        .spawn()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [mount, device, listener];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&ours, &[IoSlice::new(b"keep")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok((child, ours))
}

/// Runs the keeper in this process. Standard input is the connection to the pager.
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
            Err(error) => tracing::warn!(%error, "cannot abort the mount; programs may hang"),
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
    let mut bytes = [0u8; MESSAGE_BYTES];
    loop {
        let read = match recv(&line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => 0,
        };
        match Order::parse(&bytes[..read]) {
            Some(Order::Drop(part)) => {
                for report in drop_part(&mount, &device, part) {
                    // An error means that the connection has ended.
                    let _ = send(&line, &report.to_bytes(), SendFlags::NOSIGNAL);
                }
            }
            Some(Order::End) => return Ok(()),
            // The connection has ended: the thread "end" aborts the mount and ends the process.
            None => loop {
                std::thread::park();
            },
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
    fds.try_into().map_err(|_| io::Error::other("no mount on stdin; a pager starts this command"))
}

/// The file that aborts the FUSE connection of a mount.
struct Abort(OwnedFd);

impl Abort {
    /// Opens the file in advance: once pager and node are gone, a call on the mount may not return.
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
        // Fails if the mount is gone.
        let _ = rustix::io::write(&self.0, b"1");
    }
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

/// Lifts the kernel's limit on dirty pages of FUSE file systems, which slows writers down. The
/// pager limits them too, since it limits all cached pages of the mount.
fn lift_dirty_limit(mount: &OwnedFd) {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(known) = statx(mount, "", flags, StatxFlags::TYPE) else { return };
    let place = format!("/sys/class/bdi/{}:{}", known.stx_dev_major, known.stx_dev_minor);
    for (name, value) in [("strict_limit", "0"), ("max_ratio", "100")] {
        if let Err(error) = std::fs::write(format!("{place}/{name}"), value) {
            tracing::debug!(%error, name, "cannot lift the dirty-page limit; writes may be slow");
        }
    }
}

/// Has dirty pages written back in large requests, and then invalidates the part.
fn drop_part(mount: &OwnedFd, device: &OwnedFd, part: Part) -> Vec<Report> {
    let dropped = vec![Report { part, is_kept: false }];
    let Part { node, offset, bytes } = part;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let opened = openat(mount, format!("#{node}"), flags, Mode::empty());
    if let Ok(file) = &opened {
        // SAFETY: numbers only.
        let _ = unsafe {
            let (at, len) = (offset as i64, bytes as i64);
            libc::sync_file_range(file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
    let _ = rustix::io::write(device, &drop_pages(node, offset, bytes));
    match &opened {
        Ok(file) if cached_pages(file, offset, bytes) > 0 => page_by_page(file, part),
        // An error: the file was removed.
        _ => dropped,
    }
}

/// Reports for each run of pages whether the kernel has kept it.
fn page_by_page(file: &OwnedFd, part: Part) -> Vec<Report> {
    let page = PAGE_SIZE as u64;
    let mut reports: Vec<Report> = Vec::new();
    for offset in (part.offset..part.offset + part.bytes).step_by(PAGE_SIZE) {
        let is_kept = cached_pages(file, offset, page) > 0;
        match reports.last_mut() {
            Some(last) if last.is_kept == is_kept => last.part.bytes += page,
            _ => reports.push(Report { part: Part { offset, bytes: page, ..part }, is_kept }),
        }
    }
    reports
}

/// Pages of the range that are in the page cache (`cachestat`, Linux 6.5). 0 on an error.
fn cached_pages(file: &OwnedFd, offset: u64, bytes: u64) -> u64 {
    let range = [offset, bytes];
    // Cached, dirty, in write-back, evicted, recently evicted.
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two words of `range`, and writes five of `counts`.
    let done = unsafe {
        let (range, counts) = (range.as_ptr(), counts.as_mut_ptr());
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range, counts, 0)
    };
    if done == 0 { counts[0] } else { 0 }
}

/// The libc crate does not have the number yet. It is the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// Accepts one program, and answers it in a thread of its own.
fn answer_programs(listener: &OwnedFd, mount: &Arc<OwnedFd>, asking: &Arc<AtomicUsize>) {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    let came = poll(&mut polled, None).and_then(|_| accept_with(listener, SocketFlags::CLOEXEC));
    let program = match came {
        Ok(program) => program,
        // The program is gone again.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
        Err(_) => return std::thread::sleep(Duration::from_millis(10)),
    };
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
        // The program finds its connection closed, and asks again.
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
    // Never waits for the program: it may have ended.
    let _ = sendmsg(program, &parts, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Gives files that this thread makes to this user and group.
fn become_user(user: u32, group: u32) -> Result<(), Errno> {
    // SAFETY: numbers only; both calls change the calling thread alone.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, group);
        libc::syscall(libc::SYS_setfsuid, user);
    }
    Ok(())
}

/// Answers the question of a program. Returns the file that it opens, if it opens one.
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
    fn order_parses_from_its_bytes() {
        let part = Part { node: 7, offset: 8192, bytes: 4096 };
        for order in [Order::Drop(part), Order::End] {
            assert_eq!(Order::parse(&order.to_bytes()), Some(order));
        }
        assert_eq!(Order::parse(&[1; 5]), None);
        for is_kept in [false, true] {
            let report = Report { part, is_kept };
            assert_eq!(Report::parse(&report.to_bytes()), Some(report));
        }
    }

    #[test]
    fn pages_that_the_kernel_keeps_are_reported_as_runs() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE_SIZE], 0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE_SIZE], 3 * 4096).unwrap();
        let file = OwnedFd::from(file);
        let part = Part { node: 7, offset: 0, bytes: 4 * 4096 };
        if cached_pages(&file, 0, part.bytes) == 0 {
            println!("skipped: pages_that_the_kernel_keeps_are_reported_as_runs: no cachestat");
            return;
        }
        let runs: Vec<_> = page_by_page(&file, part)
            .iter()
            .map(|report| (report.part.offset / 4096, report.part.bytes / 4096, report.is_kept))
            .collect();
        assert_eq!(runs, [(0, 1, true), (1, 2, false), (3, 1, true)]);
    }
}
