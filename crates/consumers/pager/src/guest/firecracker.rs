//! Firecracker's own hand-over, when it restores a snapshot with the `Uffd` memory backend.
//!
//! It connects to a stream socket and sends one message: a JSON array of its regions, and the
//! userfaultfd by `SCM_RIGHTS`. Nothing is answered. It keeps the connection open as long as it
//! lives. Each region says where in the snapshot's memory file its contents are; those have been
//! loaded into the pool before ([`super::image`]).
//!
//! Its memory is private, and registered for missing pages only. So pages are brought in on demand,
//! and given up when its balloon frees them, but none can be taken away: no thread of ours can be
//! in a static program, and nobody else may. The local limit is not kept for it, and the statistics
//! say so.

use super::Ram;
use super::handover::{Refused, is_userfaultfd};
use super::span::{self, MAX_REGIONS, Refusal, Span};
use crate::core::{Core, close};
use crate::process::guard::{helper_label, uffd_label};
use crate::programs::address_space::AddressSpace;
use crate::programs::attach::{self, peer};
use crate::serve::Server;
use crate::serve::source::Source;
use crate::shared::Shared;
use crate::state::Flag;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::Uffd;
use rustix::event::epoll::EventFlags;
use rustix::net::{RecvAncillaryMessage, RecvFlags, ReturnFlags};
use serde::Deserialize;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Longest message; one region takes about 150 bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// How long a peer may take to say what it has to.
const PATIENCE: Duration = Duration::from_secs(5);

/// Peers that may be about to say something at a time.
const MAX_ARRIVING: usize = 16;

/// A region, in Firecracker's words. Fields that later versions add are ignored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
struct Mapping {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    /// In bytes, since version 1.8.
    page_size: Option<u64>,
    /// In bytes too, in the versions that have it; in KiB, as its name says, is understood as well.
    page_size_kib: Option<u64>,
}

impl Mapping {
    fn page_bytes(&self) -> u64 {
        let page = PAGE_SIZE as u64;
        match (self.page_size, self.page_size_kib) {
            (Some(bytes), _) => bytes,
            (None, Some(4)) | (None, None) => page,
            (None, Some(bytes)) => bytes,
        }
    }
}

/// A message as it was read so far.
#[derive(Debug)]
enum Parsed {
    /// All of it has come.
    Whole(Vec<Span>),
    /// Only its beginning has come.
    Part,
}

/// Reads the message. `image_bytes` is how much of the snapshot's memory there is.
fn parse(bytes: &[u8], image_bytes: u64) -> Result<Parsed, Refused> {
    let mappings = match serde_json::from_slice::<Vec<Mapping>>(bytes) {
        Ok(mappings) => mappings,
        Err(error) if error.is_eof() => return Ok(Parsed::Part),
        Err(error) => return Err(Refused::Json(error)),
    };
    if mappings.is_empty() {
        return Err(Refused::NoRegions);
    }
    if mappings.len() > MAX_REGIONS {
        return Err(Refusal::TooMany.into());
    }
    let mut spans = Vec::with_capacity(mappings.len());
    for mapping in mappings {
        let Mapping { base_host_virt_addr: start, size: len, offset, .. } = mapping;
        let page = mapping.page_bytes();
        if page != PAGE_SIZE as u64 {
            return Err(Refusal::HugePages(page).into());
        }
        let span = Span { start, len, offset, file: None };
        span::check(&spans, &span)?;
        if offset + len > image_bytes {
            return Err(Refusal::BeyondFile(start, offset + len, image_bytes).into());
        }
        spans.push(span);
    }
    Ok(Parsed::Whole(spans))
}

/// A peer that has connected and not said all yet.
struct Arriving {
    socket: RawFd,
    since: Instant,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Arriving {
    fn new(socket: RawFd) -> Arriving {
        Arriving { socket, since: Instant::now(), bytes: Vec::new(), fds: Vec::new() }
    }

    fn is_late(&self) -> bool {
        self.since.elapsed() > PATIENCE
    }

    /// Reads what has come. The regions, once they are all there.
    fn read(&mut self, image_bytes: u64) -> Result<Option<Vec<Span>>, Refused> {
        let mut part = [0u8; 4096];
        // Credentials come with each part, as on every connection that is accepted.
        let space = rustix::cmsg_space!(ScmRights(2), ScmCredentials(1));
        let mut space = vec![std::mem::MaybeUninit::uninit(); space];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = {
            let mut parts = [std::io::IoSliceMut::new(&mut part)];
            // SAFETY: open until this is done with.
            let socket = unsafe { BorrowedFd::borrow_raw(self.socket) };
            rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags)
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.fds.extend(rights);
            }
        }
        let received = match received {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(Refused::HungUp(self.bytes.len(), Some(error))),
            Ok(received) if received.bytes == 0 => {
                return Err(Refused::HungUp(self.bytes.len(), None));
            }
            Ok(received) => received,
        };
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > 1 {
            return Err(Refused::Descriptors(self.fds.len().max(2), 1));
        }
        self.bytes.extend_from_slice(&part[..received.bytes]);
        if self.bytes.len() > MAX_MESSAGE {
            return Err(Refused::TooLong(MAX_MESSAGE));
        }
        match parse(&self.bytes, image_bytes)? {
            Parsed::Part => Ok(None),
            Parsed::Whole(spans) => Ok(Some(spans)),
        }
    }
}

/// Firecracker's socket, and who has connected to it.
pub(crate) struct Firecracker {
    listener: RawFd,
    image_bytes: u64,
    listens: bool,
    arriving: HashMap<RawFd, Arriving>,
}

impl Server {
    /// Firecracker will be listened to once its image is in the pool. Until then it waits in the
    /// socket's queue, and its message with it.
    pub(crate) fn expect_firecracker(&mut self, listener: RawFd, image_bytes: u64) {
        let arriving = HashMap::new();
        self.firecracker = Some(Firecracker { listener, image_bytes, listens: false, arriving });
    }

    /// Begins to listen when it is time to, and ends peers that say nothing.
    pub(crate) fn tend_firecracker(&mut self) -> std::io::Result<()> {
        let Some(firecracker) = &mut self.firecracker else { return Ok(()) };
        let late: Vec<RawFd> =
            firecracker.arriving.values().filter(|p| p.is_late()).map(|p| p.socket).collect();
        for fd in late {
            let peer = firecracker.arriving.remove(&fd).expect("just listed");
            refuse(&self.shared, &peer, &Refused::Silent);
        }
        if firecracker.listens || !self.shared.lock().state.is(Flag::ImageLoaded) {
            return Ok(());
        }
        firecracker.listens = true;
        let listener = firecracker.listener;
        self.watch(listener, Source::FirecrackerListener, EventFlags::IN)
    }

    pub(crate) fn accept_firecracker(&mut self) -> std::io::Result<()> {
        while let Some(firecracker) = &mut self.firecracker
            && let Some(fd) = attach::accept(firecracker.listener)
        {
            let peer = Arriving::new(fd);
            if firecracker.arriving.len() >= MAX_ARRIVING {
                refuse(&self.shared, &peer, &Refused::Silent);
                continue;
            }
            firecracker.arriving.insert(fd, peer);
            self.watch(fd, Source::Firecracker(fd), EventFlags::IN)?;
        }
        Ok(())
    }

    pub(crate) fn hear_firecracker(&mut self, fd: RawFd) -> std::io::Result<()> {
        let Some(firecracker) = &mut self.firecracker else { return Ok(()) };
        let Some(peer) = firecracker.arriving.remove(&fd) else { return Ok(()) };
        let image_bytes = firecracker.image_bytes;
        // A peer that has said all is closed, or watched for its end only.
        self.unwatch(fd);
        if let Some(peer) = hear(self, peer, image_bytes) {
            self.watch(fd, Source::Firecracker(fd), EventFlags::IN)?;
            let firecracker = self.firecracker.as_mut().expect("it was just used");
            firecracker.arriving.insert(fd, peer);
        }
        Ok(())
    }
}

/// A peer has something to say. It is returned if it has more; else it was refused, or its memory
/// is paged.
fn hear(server: &Server, mut peer: Arriving, image_bytes: u64) -> Option<Arriving> {
    let shared = &server.shared;
    let outcome = match peer.read(image_bytes) {
        Ok(None) => return Some(peer),
        Ok(Some(spans)) => take(shared, peer.socket, &spans, std::mem::take(&mut peer.fds)),
        Err(refused) => Err(refused),
    };
    match outcome {
        Ok((index, uffd)) => {
            tracing::info!("guest RAM of Firecracker is paged; its local limit cannot be kept");
            server.watch_guest(index, uffd, Some(peer.socket));
        }
        Err(refused) => refuse(shared, &peer, &refused),
    }
    None
}

/// Ends a peer that cannot be served; Firecracker's protocol has no answer.
fn refuse(shared: &Shared, peer: &Arriving, refused: &Refused) {
    shared.lock().stats.handovers_refused += 1;
    tracing::warn!(reason = refused.to_string(), "a hand-over by Firecracker is refused");
    close(peer.socket);
}

fn take(
    shared: &Shared,
    socket: RawFd,
    spans: &[Span],
    mut fds: Vec<OwnedFd>,
) -> Result<(usize, Uffd), Refused> {
    let uffd = match fds.pop() {
        Some(uffd) if is_userfaultfd(&uffd) => uffd,
        Some(_) => return Err(Refused::NoUserfaultfd),
        None => return Err(Refused::Descriptors(0, 1)),
    };
    let pid = peer(socket).ok_or(Refused::NoPeer)?;
    rustix::io::ioctl_fionbio(&uffd, true).map_err(|_| Refused::NoUserfaultfd)?;
    let mut guard = shared.lock();
    let core = &mut *guard;
    core.check_no_guest()?;
    if core.state.is(Flag::ImageGiven) {
        return Err(Refused::ImageGiven);
    }
    let mut space = AddressSpace::hypervisor(Uffd(uffd.as_raw_fd()), pid);
    // A successor must be able to read the page table.
    let first = spans[0].start / PAGE_SIZE as u64;
    space.mapped(first, 1).map_err(Refused::PageTable)?;
    let index = core.free_space().ok_or(Refused::TooManySpaces)?;
    space.serial = core.state.next_serial();
    let labels = vec![uffd_label(space.serial), helper_label(space.serial)];
    core.guard.hold(labels, &[uffd.as_raw_fd(), socket]);
    let mut ram = Ram::new(Some(socket));
    for span in spans {
        if !ram.add(&core.state, index, *span, None) {
            ram.erase(&core.state);
            core.guard.release(space.serial);
            return Err(Refusal::TooMany.into());
        }
    }
    space.guest = Some(ram);
    let added = core.add_space(space);
    debug_assert_eq!(added, Some(index));
    let uffd = Uffd(uffd.into_raw_fd());
    core.give_image();
    core.lift_limit();
    Ok((index, uffd))
}

impl Core {
    /// Nothing can be taken away, so no fault may wait for room.
    pub(crate) fn lift_limit(&mut self) {
        let guests = self.live_spaces().filter_map(|(_, space)| space.guest.as_ref());
        let fixed: u64 = guests.filter(|ram| !ram.has_files()).map(Ram::bytes).sum();
        if fixed > 0 {
            self.limit_is_advisory = true;
            self.resize(self.limit + hecaton_memory::pages_for_bytes(fixed));
        }
    }

    /// The machine's contents are those of the image, which is its own from now on. A predecessor
    /// may have been killed in the middle of this.
    pub(crate) fn give_image(&mut self) {
        let is_fixed = |space: &AddressSpace| space.guest.as_ref().is_some_and(|r| !r.has_files());
        let fixed = self.live_spaces().find(|(_, space)| is_fixed(space));
        let Some((index, space)) = fixed.filter(|_| !self.state.is(Flag::ImageGiven)) else {
            return;
        };
        let page = PAGE_SIZE as u64;
        for span in space.guest.as_ref().map(Ram::spans).unwrap_or_default() {
            self.move_image(index, span.start / page, span.offset / page, span.len / page);
        }
        self.state.note(Flag::ImageGiven, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IMAGE: u64 = 256 << 20;

    fn whole(text: &str) -> Vec<Span> {
        match parse(text.as_bytes(), IMAGE) {
            Ok(Parsed::Whole(spans)) => spans,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(text: &str) -> String {
        parse(text.as_bytes(), IMAGE).expect_err(text).to_string()
    }

    /// As version 1.10 sends it for a machine of 128 MiB.
    const SENT: &str = r#"[{"base_host_virt_addr":139955083558912,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;

    #[test]
    fn messages_of_all_versions_are_understood() {
        let span = Span { start: 139_955_083_558_912, len: 128 << 20, offset: 0, file: None };
        assert_eq!(whole(SENT), [span]);
        let old = r#"[{"base_host_virt_addr":139955083558912,"size":134217728,"offset":0}]"#;
        assert_eq!(whole(old), [span]);
        let middle = old.replace("\"offset\":0", "\"offset\":0,\"page_size_kib\":4096");
        assert_eq!(whole(&middle), [span]);
        let as_named = old.replace("\"offset\":0", "\"offset\":0,\"page_size_kib\":4,\"new\":[1]");
        assert_eq!(whole(&as_named), [span]);
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_the_reason() {
        let huge = SENT.replace("\"page_size\":4096", "\"page_size\":2097152");
        assert!(refusal(&huge).contains("2097152"), "{}", refusal(&huge));
        assert!(refusal("[]").contains("no region"));
        assert!(refusal("{}").contains("not what Firecracker sends"));
        assert!(refusal("[{\"size\":1}]").contains("not what Firecracker sends"));
        assert!(refusal(&SENT.replace("134217728", "-1")).contains("not what Firecracker sends"));
        assert!(refusal(&SENT.replace("134217728", "100")).contains("whole pages"));
        assert!(refusal(&SENT.replace("\"offset\":0", "\"offset\":268435456")).contains("ends at"));
        let twice = format!("{},{}", SENT.trim_end_matches(']'), SENT.trim_start_matches('['));
        assert!(refusal(&twice).contains("overlaps"));
        assert!(refusal(&format!("{SENT}{SENT}")).contains("not what Firecracker sends"));
    }

    #[test]
    fn a_part_is_a_part() {
        for length in 0..SENT.len() {
            let parsed = parse(&SENT.as_bytes()[..length], IMAGE);
            assert!(matches!(parsed, Ok(Parsed::Part)), "{length}: {parsed:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0..SENT.len()) {
            let _ = parse(&bytes, IMAGE);
            let mut damaged = SENT.as_bytes().to_vec();
            let end = (at + bytes.len()).min(damaged.len());
            damaged[at..end].copy_from_slice(&bytes[..end - at]);
            if let Ok(Parsed::Whole(spans)) = parse(&damaged, IMAGE) {
                prop_assert!(spans.iter().all(|span| span.offset + span.len <= IMAGE));
            }
        }
    }
}
