//! Donors on real sockets in this process, and a space and its lanes to use them.

#![allow(dead_code, reason = "each test program uses a part of this")]

pub(crate) mod silence;

use hecaton_donor::{Donor, DonorConfig, Serving};
use hecaton_memory::{Epoch, ExtentId, PAGE_SIZE, PageNo, PageSum, Size, SpaceId, page_sum};
use hecaton_space::{
    Completion, Directory, DonorAddress, Lane, ScrubStatus, Site, Space, SpaceConfig, SpaceError,
};
use hecaton_testkit::{patience, wait_until_seen};
use hecaton_transport::client::{Connection, Options, Outcome as Answer};
use hecaton_transport::protocol::{HeldExtent, Hello, Request, VERSIONS};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const SEGMENT_PAGES: u64 = 64;

pub(crate) type Page = [u8; PAGE_SIZE];

/// The donors that the tests want to be known.
#[derive(Default)]
pub(crate) struct Known(Mutex<BTreeMap<String, SocketAddr>>);

impl Known {
    pub(crate) fn set(&self, name: &str, addr: SocketAddr) {
        self.0.lock().unwrap().insert(name.to_owned(), addr);
    }
}

impl Directory for Known {
    fn donors(&self) -> Vec<DonorAddress> {
        let known = self.0.lock().unwrap();
        let address = |(name, addr): (&String, &SocketAddr)| DonorAddress {
            name: name.clone(),
            site: Site::unplaced(name),
            addr: *addr,
        };
        known.iter().map(address).collect()
    }
}

pub(crate) struct Lent {
    pub(crate) name: String,
    pub(crate) donor: Donor,
    pub(crate) serving: Option<Serving>,
}

impl Lent {
    pub(crate) fn start(name: &str, segments: u64) -> Lent {
        Lent::start_at(name, segments, (Ipv4Addr::LOCALHOST, 0).into())
    }

    pub(crate) fn start_at(name: &str, segments: u64, address: SocketAddr) -> Lent {
        Lent::start_with(name, segments, address, None)
    }

    /// One that speaks TLS, with the certificate in that directory.
    pub(crate) fn start_secure(name: &str, segments: u64, tls_dir: PathBuf) -> Lent {
        Lent::start_with(name, segments, (Ipv4Addr::LOCALHOST, 0).into(), Some(tls_dir))
    }

    fn start_with(
        name: &str,
        segments: u64,
        address: SocketAddr,
        tls_dir: Option<PathBuf>,
    ) -> Lent {
        let lend = Size(segments * SEGMENT_PAGES * PAGE_SIZE as u64);
        let config = DonorConfig { tls_dir, ..DonorConfig::new(name, address, lend) };
        let donor = Donor::open(&config, None).unwrap();
        let serving = Some(donor.serve(TcpListener::bind(address).unwrap()).unwrap());
        Lent { name: name.to_owned(), donor, serving }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.serving.as_ref().expect("the donor serves").address()
    }

    /// Ends all connections; the memory stays.
    pub(crate) fn stop(&mut self) -> SocketAddr {
        let address = self.address();
        self.serving = None;
        address
    }

    pub(crate) fn serve_again(&mut self, address: SocketAddr) {
        self.serving = Some(self.donor.serve(TcpListener::bind(address).unwrap()).unwrap());
    }

    /// A donor answers that extents are freed before its host has their memory back.
    pub(crate) fn assert_all_comes_back(&self) {
        wait_until_seen(&format!("donor {} has all its memory back", self.name), || {
            self.is_all_free().then_some(()).ok_or_else(|| format!("{:?}", self.donor.snapshot()))
        });
    }

    pub(crate) fn is_all_free(&self) -> bool {
        let snapshot = self.donor.snapshot();
        snapshot.free_pages == snapshot.pages
    }
}

/// Configuration of a space that takes no donor for silent because its machine is busy.
pub(crate) fn config(pages: u64) -> SpaceConfig {
    let mut config = SpaceConfig::new(SpaceId(0x5eed), Epoch(1), "test", pages);
    config.segment_order = SEGMENT_PAGES.ilog2() as u8;
    config.give_up = 2 * patience();
    let_be_silent_for(patience(), &mut config);
    config
}

/// Has a space take a donor for silent that says nothing for so long.
pub(crate) fn let_be_silent_for(limit: Duration, config: &mut SpaceConfig) {
    config.patience = limit;
    config.failover = limit;
    config.connection.connect = limit;
    config.connection.answer = limit;
}

pub(crate) fn cluster(donors: &[&Lent]) -> Arc<Known> {
    let known = Known::default();
    donors.iter().for_each(|donor| known.set(&donor.name, donor.address()));
    Arc::new(known)
}

pub(crate) fn content(page: PageNo, turn: u64) -> Page {
    let mut content = [turn as u8; PAGE_SIZE];
    content[..8].copy_from_slice(&page.to_le_bytes());
    content[8..16].copy_from_slice(&turn.to_le_bytes());
    content
}

/// Result of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    Read(Vec<u8>),
    Written,
    Failed(SpaceError),
}

/// Waits for one request, as a pager does: on the descriptors alone.
pub(crate) fn finish(lane: &mut Lane, wanted: u64, pages: usize) -> Outcome {
    let mut data = Vec::new();
    let mut outcome = None;
    let deadline = Instant::now() + patience();
    while outcome.is_none() {
        lane.progress(None, &mut |completion| match completion {
            Completion::Read { token, from, sums, data: piece, .. } if token == wanted => {
                assert_eq!(from * PAGE_SIZE, data.len(), "pages out of order");
                for (page, sum) in piece.chunks(PAGE_SIZE).zip(sums) {
                    assert_eq!(page_sum(page), *sum);
                }
                data.extend_from_slice(piece);
                if data.len() == pages * PAGE_SIZE {
                    outcome = Some(Outcome::Read(std::mem::take(&mut data)));
                }
            }
            Completion::Written { token, .. } if token == wanted => {
                outcome = Some(Outcome::Written)
            }
            Completion::Failed { token, error, .. } if token == wanted => {
                outcome = Some(Outcome::Failed(error));
            }
            other => panic!("not asked for: {other:?}"),
        });
        if outcome.is_none() {
            assert!(
                Instant::now() < deadline,
                "request {wanted} does not end: {} in flight, {} bytes of {pages} pages read",
                lane.in_flight(),
                data.len()
            );
            wait_for_fds(lane);
        }
    }
    assert_eq!(lane.in_flight(), 0);
    outcome.expect("the loop ends with an outcome")
}

pub(crate) fn wait_for_fds(lane: &Lane) {
    let mut fds = Vec::new();
    lane.fds(&mut fds);
    let mut fds: Vec<_> = fds
        .iter()
        // SAFETY: the lane owns the descriptors and lives on.
        .map(|fd| PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(*fd) }, PollFlags::IN))
        .collect();
    let longest = patience().try_into().unwrap();
    assert_ne!(poll(&mut fds, Some(&longest)), Ok(0), "nothing ever became readable");
}

pub(crate) fn read(lane: &mut Lane, pages: &[PageNo]) -> Outcome {
    match lane.read(7, pages) {
        Ok(()) => finish(lane, 7, pages.len()),
        Err(error) => Outcome::Failed(error),
    }
}

pub(crate) fn write(lane: &mut Lane, pages: &[PageNo], turn: u64) -> Outcome {
    let contents: Vec<Page> = pages.iter().map(|page| content(*page, turn)).collect();
    let sums: Vec<u32> = contents.iter().map(|page| page_sum(page)).collect();
    let data: Vec<&[u8]> = contents.iter().map(|page| page.as_slice()).collect();
    match lane.write(8, pages, &sums, &data) {
        Ok(()) => finish(lane, 8, pages.len()),
        Err(error) => Outcome::Failed(error),
    }
}

pub(crate) fn assert_reads(lane: &mut Lane, pages: &[PageNo], turn: u64) {
    let data = match read(lane, pages) {
        Outcome::Read(data) => data,
        outcome => panic!("pages {pages:?} are not read: {outcome:?}"),
    };
    for (page, data) in pages.iter().zip(data.chunks(PAGE_SIZE)) {
        assert_eq!(data, content(*page, turn), "page {page}");
    }
}

pub(crate) fn assert_zeros(lane: &mut Lane, pages: &[PageNo]) {
    let Outcome::Read(data) = read(lane, pages) else { panic!("pages {pages:?} not read") };
    assert!(data.iter().all(|byte| *byte == 0));
}

pub(crate) fn assert_written(lane: &mut Lane, pages: &[PageNo], turn: u64) {
    let outcome = write(lane, pages, turn);
    assert!(matches!(outcome, Outcome::Written), "{outcome:?}");
}

/// Does all that the upkeep has to do.
pub(crate) fn tend_until(space: &Space, what: &str, is_done: impl Fn(&Space) -> bool) {
    wait_until_seen(&format!("the space is {what}"), || {
        if is_done(space) {
            return Ok(());
        }
        space.renew();
        space.tend(Duration::from_secs(1), u64::MAX);
        Err(format!("{:?}", space.status()))
    });
}

pub(crate) fn is_whole(space: &Space) -> bool {
    let status = space.status();
    (status.segments_degraded, status.segments_untended, status.segments_lost) == (0, 0, 0)
}

/// Writes as a pager does, which keeps what it writes until it is stored.
pub(crate) fn write_until_stored(lane: &mut Lane, pages: &[u64], turn: u64) {
    loop {
        match write(lane, pages, turn) {
            Outcome::Written => return,
            Outcome::Failed(error) if error.is_transient() => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Writes page after page, though donors may be silent for a moment on a busy machine. All copies
/// are there then.
pub(crate) fn write_until_whole(space: &Space, lane: &mut Lane, pages: &[u64], turn: u64) {
    pages.iter().for_each(|page| write_until_stored(lane, &[*page], turn));
    tend_until(space, "whole", is_whole);
}

/// Overwrites a byte of each of these pages in a donor's memory.
pub(crate) fn damage(lent: &Lent, pages: &[u64], turn: u64) {
    let memory = File::from(lent.donor.fds().unwrap().arena);
    let mut left = pages.to_vec();
    let mut found = [0; PAGE_SIZE];
    for at in (0..lent.donor.snapshot().pages).map(|page| page * PAGE_SIZE as u64) {
        memory.read_exact_at(&mut found, at).unwrap();
        if let Some(index) = left.iter().position(|page| content(*page, turn) == found) {
            left.swap_remove(index);
            memory.write_all_at(&[!found[100]], at + 100).unwrap();
        }
    }
    assert!(left.is_empty(), "pages that are not there: {left:?}");
}

/// Another borrower of the same name, who writes past a space; and what the donor holds for it.
pub(crate) fn past(lent: &Lent, space: &Space) -> (Connection, Vec<HeldExtent>) {
    let hello = Hello {
        versions: VERSIONS,
        space: space.config().id,
        epoch: Epoch(1),
        lane: 99,
        lease: Duration::from_secs(30),
        consumer: "test".into(),
    };
    let mut past = Connection::open(lent.address(), &hello, &Options::default()).unwrap();
    let Answer::Held(lines) = past.call(Request::List { from: ExtentId(0) }, &[]).unwrap() else {
        panic!("no list")
    };
    (past, lines)
}

/// Has the donor store something else for a page of a segment, with its sum: as if it had forgotten
/// a write that it has acknowledged. False if it has nothing of that segment.
pub(crate) fn write_past(lent: &Lent, space: &Space, segment: u64, page: u32, data: &Page) -> bool {
    let (mut past, lines) = past(lent, space);
    let Some(line) = lines.iter().find(|line| line.segment == segment) else { return false };
    let (extent, generation) = (line.extent, line.generation);
    let request = Request::Write { extent, generation, pages: &[page], sums: &[page_sum(data)] };
    assert_eq!(past.call(request, &[data]).unwrap(), Answer::Done);
    true
}

/// One round of the scrub.
pub(crate) fn scrub_once(space: &Space, known: &dyn Fn(u64) -> Option<PageSum>) -> ScrubStatus {
    while space.scrub(known).is_some() {}
    space.status().scrub
}
