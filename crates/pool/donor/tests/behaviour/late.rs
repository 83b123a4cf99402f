//! Requests under way while their extent is freed, its space fenced or its pages discarded.

use crate::common::*;
use hecaton_memory::Generation;
use hecaton_memory::PAGE_SIZE;
use hecaton_testkit::wait_until;
use hecaton_transport::client::{Connection, Event, Options, Outcome};
use hecaton_transport::protocol::{MAX_PAGES, Refusal, Request};
use hecaton_transport::window::WindowLimits;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const ORDER: u8 = 8;

fn all_pages() -> Vec<u32> {
    (0..MAX_PAGES as u32).collect()
}

/// One extent's worth of memory goes from owner to owner. Each owner writes and reads it from
/// several connections without pause, also during the free. The next owner must see only zeros and
/// its own writes. The owner before must never see the next one's pages.
#[test]
fn memory_that_changes_hands_takes_no_late_write_and_gives_no_late_read() {
    let (donor, serving) = start(1 << ORDER);
    let address = serving.address();
    for round in 0..60u64 {
        let (space, mine) = (round, [round as u8 + 1; PAGE_SIZE]);
        let mut owner = Borrower::connect(address, space, 1);
        let mut extent = None;
        // The pages are back when the last read of the owner before is done.
        wait_until("the memory is free again", || {
            match owner.call(Request::Allocate {
                segment: 0,
                member: 0,
                order: ORDER,
                generation: Generation(1),
            }) {
                Outcome::Allocated(given) => extent = Some(given),
                refused => assert_eq!(refused, Outcome::Refused(Refusal::Full)),
            }
            extent.is_some()
        });
        let extent = extent.unwrap();
        for (page, whole) in owner.read(extent, &all_pages()).unwrap() {
            assert!(whole && page == [0; PAGE_SIZE], "round {round}: not empty");
        }
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let mut other = Borrower::connect(address, space, 1);
                    loop {
                        let refusal = if thread % 2 == 0 {
                            let data = vec![mine; MAX_PAGES];
                            match other.write(extent, &all_pages(), &data) {
                                Outcome::Done => continue,
                                Outcome::Refused(refusal) => refusal,
                                outcome => panic!("{outcome:?}"),
                            }
                        } else {
                            match other.read(extent, &all_pages()) {
                                // A page that was being written may be half of zeros.
                                Ok(pages) => {
                                    let own = |byte| byte == mine[0] || byte == 0;
                                    let bytes = pages.iter().flat_map(|(page, _)| page);
                                    assert!(bytes.copied().all(own), "another space's page");
                                    continue;
                                }
                                Err(refusal) => refusal,
                            }
                        };
                        assert_eq!(refusal, Refusal::NoSuchExtent);
                        break;
                    }
                });
            }
            let goal = (round + 1) * 4 * MAX_PAGES as u64;
            wait_until("there is traffic", || donor.snapshot().counters.pages_written >= goal);
            owner.done(Request::Free { extent });
        });
    }
}

/// A borrower asks for more than its socket takes and then receives nothing. The read that sits in
/// the donor's socket holds the memory, though the extent is freed: nobody gets it until the read
/// is through.
#[test]
fn memory_is_not_lent_while_a_read_of_it_is_being_sent() {
    const READS: u64 = 60;
    let (donor, serving) = start(1 << ORDER);
    let address = serving.address();
    let mut owner = Borrower::connect(address, 1, 1);
    let extent = owner.allocate(0, ORDER);
    let data = vec![[0xaa; PAGE_SIZE]; MAX_PAGES];
    assert_eq!(owner.write(extent, &all_pages(), &data), Outcome::Done);
    let window = WindowLimits { requests: READS as usize, payload_bytes: 64 << 20 };
    let options = Options { window, ..Options::default() };
    let mut slow = Connection::open(address, &hello(1, 1, LONG_LEASE), &options).unwrap();
    for tag in 0..READS {
        slow.submit(tag, Request::Read { extent, pages: &all_pages() }, &[]).unwrap();
    }
    waits_in_its_socket(&donor);

    owner.done(Request::Free { extent });
    assert_eq!(donor.snapshot().leaving_pages, MAX_PAGES as u64);
    let mut next = Borrower::connect(address, 2, 1);
    let allocate =
        Request::Allocate { segment: 0, member: 0, order: ORDER, generation: Generation(1) };
    assert_eq!(next.refused(allocate), Refusal::Full);

    let (mut pages, mut refused) = (0, 0);
    while slow.in_flight() > 0 {
        slow.progress(&mut |_, event| match event {
            Event::Pages { data, .. } => {
                assert!(data.iter().all(|&byte| byte == 0xaa));
                pages += data.len() / PAGE_SIZE;
            }
            event => {
                assert_eq!(event, Event::Refused(Refusal::NoSuchExtent));
                refused += MAX_PAGES;
            }
        })
        .unwrap();
    }
    assert_eq!(pages + refused, READS as usize * MAX_PAGES);
    wait_until("the memory is free", || donor.snapshot().free_pages == MAX_PAGES as u64);
    let extent = next.allocate(0, ORDER);
    assert_eq!(next.pages(extent, &[0]), [[0; PAGE_SIZE]]);
}

/// A new owner raises the fence and reads the pages. From then on they must not change.
///
/// The pages are discarded just before, so that the writes under way take long: each page is
/// committed anew.
#[test]
fn nothing_of_an_older_epoch_lands_after_the_fence() {
    let (donor, serving) = start(1 << ORDER);
    let address = serving.address();
    let mut first = Borrower::connect(address, 1, 0);
    let extent = first.allocate(0, ORDER);
    for epoch in 1..100u64 {
        let written_before = donor.snapshot().counters.pages_written;
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                let mut old = Borrower::connect(address, 1, epoch - 1);
                scope.spawn(move || {
                    let mut fill = (epoch as u8) ^ (thread << 6);
                    loop {
                        fill = fill.wrapping_add(1);
                        let data = vec![[fill; PAGE_SIZE]; MAX_PAGES];
                        match old.write(extent, &all_pages(), &data) {
                            Outcome::Done => {}
                            outcome => {
                                let stale = Refusal::StaleEpoch(hecaton_memory::Epoch(epoch));
                                assert_eq!(outcome, Outcome::Refused(stale));
                                break;
                            }
                        }
                    }
                });
            }
            let goal = written_before + 3 * MAX_PAGES as u64;
            wait_until("there is traffic", || donor.snapshot().counters.pages_written >= goal);
            let mut new = Borrower::connect(address, 1, epoch);
            new.done(Request::Discard {
                extent,
                generation: Generation(1),
                first: 0,
                count: 1 << ORDER,
            });
            new.done(Request::Fence);
            let then = new.read(extent, &all_pages()).unwrap();
            for _ in 0..5 {
                assert!(new.read(extent, &all_pages()).unwrap() == then, "a late write");
            }
        });
    }
}

/// Whichever comes first, a page that is written and discarded at once is the one or the other. The
/// discard is sent a little later in each round, so that in some it meets the write.
#[test]
fn a_write_that_meets_a_discard_leaves_a_whole_page() {
    const ROUNDS: u32 = 4000;
    const PAGES: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let (_donor, serving) = start(1 << ORDER);
    let address = serving.address();
    let mut borrower = Borrower::connect(address, 1, 1);
    let mut discarder = Borrower::connect(address, 1, 1);
    let extent = borrower.allocate(0, ORDER);
    let data = [[0x55; PAGE_SIZE]; PAGES.len()];
    let line = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                line.wait();
                let sent = Instant::now() + Duration::from_micros(u64::from(round % 80));
                while Instant::now() < sent {
                    std::hint::spin_loop();
                }
                discarder.done(Request::Discard {
                    extent,
                    generation: Generation(1),
                    first: 0,
                    count: PAGES.len() as u32,
                });
                line.wait();
            }
        });
        let mut broken = 0;
        for _ in 0..ROUNDS {
            line.wait();
            assert_eq!(borrower.write(extent, &PAGES, &data), Outcome::Done);
            line.wait();
            let read = borrower.read(extent, &PAGES).unwrap();
            let is_one = |page: &Page| *page == [0x55; PAGE_SIZE] || *page == [0; PAGE_SIZE];
            broken += read.iter().filter(|(page, whole)| !whole || !is_one(page)).count();
        }
        assert_eq!(broken, 0, "pages that are neither what was written nor zeros");
    });
}
