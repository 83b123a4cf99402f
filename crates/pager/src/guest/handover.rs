//! The hand-over of guest RAM by `libhecaton.so` in a hypervisor: see [`hecaton_uffd::guest_ram`].
//!
//! Whatever is wrong with one is answered with the reason, which the library prints and which makes
//! the hypervisor's `mmap` fail; it is logged in one line, and nothing else changes.

use super::Ram;
use super::memory_file::MemoryFile;
use super::region::{self, Refusal, Span};
use crate::address_space::AddressSpace;
use crate::attach::{Message, peer, receive_message};
use crate::core::{Core, Shared, close};
use crate::serve::Server;
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
}

/// What a message brings, once its descriptors are as many and of the kind that they must be.
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
        region::check(&[], &span)?;
        let facts = MemoryFile(file.as_raw_fd()).facts().map_err(Refused::File)?;
        region::check_file(&span, &facts)?;
        span.file = Some(facts.identity);
        Ok(Delivery { uffd, file, span })
    }
}

pub(super) fn is_userfaultfd(fd: &OwnedFd) -> bool {
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
    let mut space = AddressSpace::new(Uffd(uffd.as_raw_fd()));
    space.pid = Some(pid);
    space.charged = true;
    space.guest = Some(Ram::new(Some(socket)));
    let index = core.add_space(space).ok_or(Refused::TooManySpaces)?;
    let uffd = Uffd(uffd.into_raw_fd());
    core.add_region(index, span, Some(MemoryFile(file.into_raw_fd())));
    Ok((index, uffd))
}

/// A hypervisor whose memory is paged has something to say, or has hung up. False in the latter
/// case.
pub(crate) fn go_on(shared: &Shared, index: usize, socket: RawFd) -> bool {
    let Some(Message { bytes, fds }) = receive_message(socket) else { return false };
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
    core.add_region(index, span, Some(MemoryFile(file.into_raw_fd())));
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
        region::check(known, span)?;
        // Lifts a protection that nothing has; fails unless all of it is registered for it.
        uffd.unprotect(span.start, span.len).map_err(|errno| Refused::NotRegistered(errno.into()))
    }

    /// Takes a region that was checked, and what is in it already.
    pub(super) fn add_region(&mut self, index: usize, span: Span, file: Option<MemoryFile>) {
        let space = self.spaces[index].as_mut().expect("named by the caller");
        let ram = space.guest.as_mut().expect("named by the caller");
        let added = ram.add(&self.state, index, span, file);
        let range = Range { start: span.start, len: span.len };
        if !added || self.adopt_pages(index, range).is_err() {
            self.fail("guest RAM cannot be looked at".into());
        }
    }
}
