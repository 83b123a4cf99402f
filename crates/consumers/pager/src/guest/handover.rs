//! The hand-over of guest RAM by `libhecaton.so` in a hypervisor: see [`hecaton_uffd::guest_ram`].
//!
//! Whatever is wrong with one is answered with the reason, which the library prints and which makes
//! the hypervisor's `mmap` fail; it is logged in one line, and nothing else changes.

use super::memory_file::MemoryFile;
use super::span::{self, Refusal, Span};
use super::{HeldFile, Ram};
use crate::core::{Core, close};
use crate::process::guard::{helper_label, ram_label, uffd_label};
use crate::programs::address_space::AddressSpace;
use crate::programs::attach::{Message, peer, receive_message};
use crate::serve::Server;
use crate::shared::Shared;
use hecaton_uffd::Uffd;
use hecaton_uffd::guest_ram::{Answer, Handover};
use hecaton_uffd::handover::Range;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

/// Why a hand-over is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("{0} descriptors came along instead of {1}")]
    Descriptors(usize, usize),
    #[error("the first descriptor is no userfaultfd")]
    NoUserfaultfd,
    #[error("its process cannot be told")]
    NoPeer,
    #[error("the memory file cannot be looked at ({0})")]
    File(std::io::Error),
    #[error(transparent)]
    Region(#[from] Refusal),
    #[error("the region is not registered with its userfaultfd ({0})")]
    NotRegistered(std::io::Error),
    #[error("this pager serves a machine already, process {0}; start another pager for this one")]
    Second(i32),
    #[error("too many address spaces are attached to one pager")]
    TooManySpaces,
    #[error("the message is not one of this version")]
    Malformed,
    #[error("it is not what Firecracker sends: {0}")]
    Json(serde_json::Error),
    #[error("it names no region")]
    NoRegions,
    #[error("it is longer than {0} bytes")]
    TooLong(usize),
    #[error("it hung up after {0} bytes of its message ({1:?})")]
    HungUp(usize, Option<rustix::io::Errno>),
    #[error("it has connected and not said all that it must within 5 seconds")]
    Silent,
    #[error("its page table may not be read by the pager ({0}): run both as the same user")]
    PageTable(std::io::Error),
    #[error("the image was given to a machine already; start another pager for this one")]
    ImageGiven,
    #[error("something came after the hand-over, and there is nothing more to say")]
    Twice,
}

/// Contents of a message whose descriptors have the right number and kind.
struct Delivery {
    uffd: Option<OwnedFd>,
    file: OwnedFd,
    span: Span,
}

impl Delivery {
    fn check(handover: &Handover, mut fds: Vec<OwnedFd>) -> Result<Delivery, Refused> {
        let wanted = if handover.first == 1 { 2 } else { 1 };
        if fds.len() != wanted || handover.first > 1 {
            return Err(Refused::Descriptors(fds.len(), wanted));
        }
        let file = fds.pop().expect("there are one or two");
        let uffd = fds.pop();
        if let Some(uffd) = &uffd
            && !is_userfaultfd(uffd)
        {
            return Err(Refused::NoUserfaultfd);
        }
        let Range { start, len } = handover.region;
        let mut span = Span { start, len, offset: handover.offset, file: None };
        // Before sums are made of the numbers.
        span::check(&[], &span)?;
        let facts = MemoryFile(file.as_raw_fd()).facts().map_err(Refused::File)?;
        span::check_file(&span, &facts)?;
        span.file = Some(facts.identity);
        Ok(Delivery { uffd, file, span })
    }
}

pub(crate) fn is_userfaultfd(fd: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
}

/// A newcomer's first message hands guest RAM over.
pub(crate) fn begin(
    server: &Server,
    shared: &Shared,
    socket: RawFd,
    handover: &Handover,
    fds: Vec<OwnedFd>,
) {
    match first_region(shared, socket, handover, fds) {
        Ok((index, uffd)) => {
            tracing::info!(
                start = format!("{:#x}", handover.region.start),
                bytes = handover.region.len,
                "guest RAM is paged"
            );
            server.watch_guest(index, uffd, Some(socket));
            // A hypervisor that has hung up meanwhile is noticed by its connection.
            let _ = answer(socket, &Answer::ACCEPTED);
        }
        Err(refused) => {
            refuse(shared, socket, &refused);
            close(socket);
        }
    }
}

fn refuse(shared: &Shared, socket: RawFd, refused: &Refused) {
    shared.lock().stats.handovers_refused += 1;
    let reason = refused.to_string();
    tracing::warn!(reason, "a hand-over of guest RAM is refused");
    let _ = answer(socket, &Answer::refusal(&reason));
}

fn answer(socket: RawFd, answer: &Answer) -> rustix::io::Result<usize> {
    // SAFETY: the socket is open; its caller closes it later.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(socket) };
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    rustix::net::send(socket, answer.as_bytes(), flags)
}

/// The last word on a connection.
pub(super) fn say_detached(socket: RawFd) {
    // A hypervisor that has hung up need not be told.
    let _ = answer(socket, &Answer::DETACHED);
}

fn first_region(
    shared: &Shared,
    socket: RawFd,
    handover: &Handover,
    fds: Vec<OwnedFd>,
) -> Result<(usize, Uffd), Refused> {
    let Delivery { uffd, file, span } = Delivery::check(handover, fds)?;
    let uffd = uffd.ok_or(Refused::Descriptors(1, 2))?;
    let pid = peer(socket).ok_or(Refused::NoPeer)?;
    let mut guard = shared.lock();
    let core = &mut *guard;
    core.check_no_guest()?;
    core.check_region(Uffd(uffd.as_raw_fd()), &[], &span)?;
    let mut space = AddressSpace::hypervisor(Uffd(uffd.as_raw_fd()), pid);
    let index = core.free_space().ok_or(Refused::TooManySpaces)?;
    // The node has all of it before it is written down, and the region is written down before what
    // it belongs to: a successor finds all or nothing.
    space.serial = core.state.next_serial();
    let held = HeldFile { file: MemoryFile(file.into_raw_fd()), serial: core.state.next_serial() };
    let uffd = Uffd(uffd.into_raw_fd());
    let labels = vec![uffd_label(space.serial), helper_label(space.serial), ram_label(held.serial)];
    core.guard.hold(labels, &[uffd.0, socket, held.file.0]);
    let mut ram = Ram::new(Some(socket));
    let added = ram.add(&core.state, index, span, Some(held));
    debug_assert!(added, "there is no other machine");
    space.guest = Some(ram);
    let index = core.add_space(space).ok_or(Refused::TooManySpaces)?;
    core.adopt_region(index, &span);
    Ok((index, uffd))
}

/// A hypervisor whose memory is paged has something to say, or has hung up. False in the latter
/// case.
pub(crate) fn go_on(shared: &Shared, index: usize, socket: RawFd) -> bool {
    let (bytes, fds) = match receive_message(socket) {
        Ok(Some(Message { bytes, fds, .. })) => (bytes, fds),
        Ok(None) => return true,
        Err(_) => return false,
    };
    if shared.lock().limit_is_advisory {
        // Firecracker's connection: nothing is ever answered there.
        shared.lock().stats.handovers_refused += 1;
        tracing::warn!(reason = Refused::Twice.to_string(), "a hand-over is refused");
        return true;
    }
    let added = match Handover::parse(&bytes) {
        Some(handover) => further_region(shared, index, &handover, fds),
        None => Err(Refused::Malformed),
    };
    match added {
        // As above.
        Ok(()) => drop(answer(socket, &Answer::ACCEPTED)),
        Err(refused) => refuse(shared, socket, &refused),
    }
    true
}

fn further_region(
    shared: &Shared,
    index: usize,
    handover: &Handover,
    fds: Vec<OwnedFd>,
) -> Result<(), Refused> {
    // A userfaultfd may come once more, when the first message is said again.
    let Delivery { file, span, .. } = Delivery::check(handover, fds)?;
    let mut guard = shared.lock();
    let core = &mut *guard;
    let Some(space) = core.space(index) else { return Ok(()) };
    let uffd = space.uffd;
    let known = space.guest.as_ref().map(Ram::spans).unwrap_or_default();
    if known.contains(&span) {
        return Ok(());
    }
    core.check_region(uffd, &known, &span)?;
    let serial = core.state.next_serial();
    core.guard.hold(vec![ram_label(serial)], &[file.as_raw_fd()]);
    let held = HeldFile { file: MemoryFile(file.as_raw_fd()), serial };
    let ram = core.spaces[index].as_mut().and_then(|space| space.guest.as_mut());
    let ram = ram.expect("messages are read from machines' connections");
    if !ram.add(&core.state, index, span, Some(held)) {
        core.guard.release_labels(vec![ram_label(serial)]);
        return Err(Refusal::TooMany.into());
    }
    // The region owns it now.
    let _ = file.into_raw_fd();
    core.adopt_region(index, &span);
    Ok(())
}

impl Core {
    /// A pager serves one machine: its limit and its statistics are that machine's.
    pub(super) fn check_no_guest(&self) -> Result<(), Refused> {
        let guest = self.live_spaces().find(|(_, space)| space.guest.is_some());
        match guest {
            // One that has just ended may not have been noticed yet.
            Some((_, space)) if !space.has_ended() => {
                Err(Refused::Second(space.pid.unwrap_or_default()))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_region(
        &self,
        uffd: Uffd,
        known: &[Span],
        span: &Span,
    ) -> Result<(), Refused> {
        span::check(known, span)?;
        // Lifts a protection that nothing has; fails unless all of it is registered for it.
        uffd.unprotect(span.start, span.len).map_err(|errno| Refused::NotRegistered(errno.into()))
    }

    /// Enters the pages that a new region has already.
    fn adopt_region(&mut self, index: usize, span: &Span) {
        let range = Range { start: span.start, len: span.len };
        if self.discover_pages(index, range).is_err() {
            self.fail("guest RAM cannot be looked at".into());
        }
    }
}
