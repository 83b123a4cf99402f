//! A donor on a real socket, and borrowers to ask it.

#![allow(dead_code, reason = "each test program uses a part of this")]

use hecaton_donor::{Donor, DonorConfig, Serving, listen};
use hecaton_memory::{Epoch, ExtentId, Generation, PAGE_SIZE, PageSum, Size, SpaceId, page_sum};
use hecaton_testkit::wait_until;
use hecaton_transport::client::{Connection, Options, Outcome};
use hecaton_transport::protocol::{Hello, Load, Refusal, Request, VERSIONS, Welcome};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) type Page = [u8; PAGE_SIZE];

/// Longer than any test.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(3600);

pub(crate) fn config(pages: u64) -> DonorConfig {
    DonorConfig::new("d1", ([127, 0, 0, 1], 0).into(), Size(pages * PAGE_SIZE as u64))
}

pub(crate) fn start(pages: u64) -> (Donor, Serving) {
    let config = config(pages);
    let donor = Donor::open(&config, None).unwrap();
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    (donor, serving)
}

pub(crate) struct Borrower(pub(crate) Connection);

pub(crate) fn hello(space: u64, epoch: u64, lease: Duration) -> Hello {
    static LANE: AtomicU64 = AtomicU64::new(0);
    Hello {
        versions: VERSIONS,
        space: SpaceId(space),
        epoch: Epoch(epoch),
        lane: LANE.fetch_add(1, Ordering::Relaxed),
        lease,
        consumer: format!("test-{space}"),
    }
}

impl Borrower {
    pub(crate) fn connect(address: SocketAddr, space: u64, epoch: u64) -> Borrower {
        Borrower::with_lease(address, space, epoch, LONG_LEASE)
    }

    pub(crate) fn with_lease(
        address: SocketAddr,
        space: u64,
        epoch: u64,
        lease: Duration,
    ) -> Borrower {
        let hello = hello(space, epoch, lease);
        Borrower(Connection::open(address, &hello, &Options::default()).unwrap())
    }

    pub(crate) fn welcome(&self) -> &Welcome {
        self.0.welcome().unwrap()
    }

    pub(crate) fn load(&self) -> Load {
        self.0.load()
    }

    pub(crate) fn call(&mut self, request: Request<'_>) -> Outcome {
        self.0.call(request, &[]).unwrap()
    }

    pub(crate) fn done(&mut self, request: Request<'_>) {
        assert_eq!(self.call(request), Outcome::Done, "{request:?}");
    }

    pub(crate) fn refused(&mut self, request: Request<'_>) -> Refusal {
        match self.call(request) {
            Outcome::Refused(refusal) => refusal,
            other => panic!("{request:?} was answered with {other:?}"),
        }
    }

    pub(crate) fn allocate(&mut self, segment: u64, order: u8) -> ExtentId {
        match self.call(Request::Allocate { segment, member: 0, order, generation: Generation(1) })
        {
            Outcome::Allocated(extent) => extent,
            other => panic!("no extent but {other:?}"),
        }
    }

    pub(crate) fn write(&mut self, extent: ExtentId, pages: &[u32], data: &[Page]) -> Outcome {
        let sums: Vec<_> = data.iter().map(|page| page_sum(page)).collect();
        self.write_with(extent, pages, &sums, data)
    }

    pub(crate) fn write_with(
        &mut self,
        extent: ExtentId,
        pages: &[u32],
        sums: &[PageSum],
        data: &[Page],
    ) -> Outcome {
        let request = Request::Write { extent, generation: Generation(1), pages, sums };
        self.0.call(request, &[data.as_flattened()]).unwrap()
    }

    /// Pages, each with whether it matches its sum.
    pub(crate) fn read(
        &mut self,
        extent: ExtentId,
        pages: &[u32],
    ) -> Result<Vec<(Page, bool)>, Refusal> {
        match self.call(Request::Read { extent, pages }) {
            Outcome::Pages { sums, data } => {
                let pages = data.as_chunks::<PAGE_SIZE>().0.iter();
                Ok(pages.zip(sums).map(|(page, sum)| (*page, page_sum(page) == sum)).collect())
            }
            Outcome::Refused(refusal) => Err(refusal),
            other => panic!("no pages but {other:?}"),
        }
    }

    /// Pages that must be there and whole.
    pub(crate) fn pages(&mut self, extent: ExtentId, pages: &[u32]) -> Vec<Page> {
        let read = self.read(extent, pages).unwrap();
        assert!(read.iter().all(|(_, whole)| *whole), "a page does not match its sum");
        read.into_iter().map(|(page, _)| page).collect()
    }
}

/// A page that tells which it is.
pub(crate) fn page(number: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64 | 1).to_le_bytes();
    }
    page
}

/// Waits until the donor is sending a read and gets no further: its borrower receives nothing.
pub(crate) fn waits_in_its_socket(donor: &Donor) {
    let (mut sent_before, mut unchanged) = (0, 0);
    wait_until("the donor waits in its socket", || {
        let snapshot = donor.snapshot();
        let is_stuck = snapshot.in_service == 1 && snapshot.counters.pages_read == sent_before;
        unchanged = if is_stuck { unchanged + 1 } else { 0 };
        sent_before = snapshot.counters.pages_read;
        unchanged == 20
    });
}
