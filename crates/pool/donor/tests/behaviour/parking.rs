//! A donor that is to have memory back which nobody can take, and parks it in a file.

use crate::common::*;
use hecaton_donor::{Donor, DonorConfig, DonorError, ParkConfig, ParkSnapshot, Serving, listen};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, Size, page_sum};
use hecaton_testkit::{patience, wait_until};
use hecaton_transport::client::{Connection, Event, Options, Outcome};
use hecaton_transport::protocol::{FillSource, PageState, Request};
use hecaton_transport::window::WindowLimits;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ORDER: u8 = 6;
const EXTENT_PAGES: u64 = 1 << ORDER;

/// Parks as soon as it is to have something back.
fn parking(pages: u64) -> DonorConfig {
    let park =
        ParkConfig { patience: Duration::ZERO, ..ParkConfig::new(hecaton_testkit::fast_dir()) };
    DonorConfig { park: Some(park), ..config(pages) }
}

fn start_parking(config: &DonorConfig) -> (Donor, Serving) {
    let donor = Donor::open(config, None).unwrap();
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    (donor, serving)
}

fn extents(extents: u64) -> Option<Size> {
    Some(Size(extents * EXTENT_PAGES * PAGE_SIZE as u64))
}

fn park(donor: &Donor) -> ParkSnapshot {
    donor.snapshot().park.unwrap()
}

fn committed_pages(donor: &Donor) -> u64 {
    donor.snapshot().committed_bytes / PAGE_SIZE as u64
}

/// Waits until so many extents are in the file and the others, with all of their pages written, in
/// memory.
fn parked(donor: &Donor, in_file: u64, in_memory: u64) {
    wait_until(&format!("{in_file} extents are parked"), || {
        park(donor).parked_pages == in_file * EXTENT_PAGES
            && committed_pages(donor) == in_memory * EXTENT_PAGES
            && park(donor).file_bytes == in_file * EXTENT_PAGES * PAGE_SIZE as u64
    });
}

fn all_pages() -> Vec<u32> {
    (0..EXTENT_PAGES as u32).collect()
}

/// An extent that is written from end to end with pages that tell where they belong.
fn written(borrower: &mut Borrower, segment: u64) -> ExtentId {
    let extent = borrower.allocate(segment, ORDER);
    write_all(borrower, extent, segment);
    extent
}

fn write_all(borrower: &mut Borrower, extent: ExtentId, number: u64) {
    assert_eq!(borrower.write(extent, &all_pages(), &contents(number)), Outcome::Done);
}

fn contents(number: u64) -> Vec<Page> {
    (0..EXTENT_PAGES).map(|at| page(number * 1000 + at)).collect()
}

#[test]
fn what_nobody_can_take_is_parked_and_comes_back() {
    let (donor, serving) = start_parking(&parking(16 * EXTENT_PAGES));
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..5).map(|segment| written(&mut borrower, segment)).collect();
    assert_eq!(committed_pages(&donor), 5 * EXTENT_PAGES);
    donor.set_limit(extents(2));
    parked(&donor, 3, 2);
    assert_eq!(borrower.load().recalled, 0, "as of the last answer");
    for (extent, number) in held.iter().zip(0..) {
        assert_eq!(borrower.pages(*extent, &all_pages()), contents(number));
        let every_third: Vec<u32> = all_pages().into_iter().step_by(3).collect();
        let expected: Vec<_> = contents(number).into_iter().step_by(3).collect();
        assert_eq!(borrower.pages(*extent, &every_third), expected);
    }
    assert!(park(&donor).pages_read >= 3 * EXTENT_PAGES);
    assert_eq!(borrower.load().recalled, 3, "whoever has room later may still take it");
    assert_eq!(borrower.load().free_pages, 0);
    let snapshot = donor.snapshot();
    assert_eq!(snapshot.in_use_bytes(), extents(2).unwrap().0);

    donor.set_limit(extents(4));
    parked(&donor, 1, 4);
    donor.set_limit(None);
    parked(&donor, 0, 5);
    for (extent, number) in held.iter().zip(0..) {
        assert_eq!(borrower.pages(*extent, &all_pages()), contents(number));
    }
    assert_eq!(park(&donor).pages_fetched, 3 * EXTENT_PAGES);
}

#[test]
fn borrowers_have_time_to_find_room_elsewhere() {
    let patience = Duration::from_secs(3600);
    let mut config = parking(16 * EXTENT_PAGES);
    config.park.as_mut().unwrap().patience = patience;
    let (donor, serving) = start_parking(&config);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held = written(&mut borrower, 0);
    donor.set_limit(Some(Size(0)));
    wait_until("it is asked for", || {
        borrower.done(Request::Renew);
        borrower.load().recalled == 1
    });
    borrower.done(Request::Free { extent: held });
    wait_until("it is back", || committed_pages(&donor) == 0);
    assert_eq!(park(&donor).pages_stored, 0);
}

#[test]
fn what_is_written_while_parked_is_what_is_read() {
    let (donor, serving) = start_parking(&parking(16 * EXTENT_PAGES));
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..3).map(|segment| written(&mut borrower, segment)).collect();
    donor.set_limit(Some(Size(0)));
    parked(&donor, 3, 0);
    let stored = park(&donor).pages_stored;
    for round in 1..6 {
        for (extent, number) in held.iter().zip(0..) {
            let pages = [7, 8, 40 + round as u32];
            let data: Vec<_> = pages.map(|at| page(number * 77 + round * 7 + u64::from(at))).into();
            assert_eq!(borrower.write(*extent, &pages, &data), Outcome::Done);
            assert_eq!(borrower.pages(*extent, &pages), data);
        }
    }
    // In memory again for a moment only.
    parked(&donor, 3, 0);
    assert!(park(&donor).pages_stored > stored);
    for (extent, number) in held.iter().zip(0..) {
        let expected = [page(number * 77 + 42), page(number * 77 + 43), page(number * 1000 + 9)];
        assert_eq!(borrower.pages(*extent, &[7, 8, 9]), expected);
    }
}

#[test]
fn what_is_freed_or_discarded_while_parked_is_gone_from_the_file() {
    let (donor, serving) = start_parking(&parking(4 * EXTENT_PAGES));
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..3).map(|segment| written(&mut borrower, segment)).collect();
    donor.set_limit(Some(Size(0)));
    parked(&donor, 3, 0);
    let generation = Generation(1);
    borrower.done(Request::Discard { extent: held[0], generation, first: 10, count: 20 });
    let read = borrower.pages(held[0], &[9, 10, 29, 30]);
    assert_eq!(read, [page(9), [0; PAGE_SIZE], [0; PAGE_SIZE], page(30)]);
    borrower.done(Request::Free { extent: held[1] });
    let file_pages = 2 * EXTENT_PAGES - 20;
    wait_until("the file has room again", || {
        park(&donor).file_bytes == file_pages * PAGE_SIZE as u64
    });
    // Somebody else has the memory now, and finds nothing there.
    donor.set_limit(None);
    wait_until("all is in memory", || park(&donor).file_bytes == 0);
    let mut other = Borrower::connect(serving.address(), 2, 1);
    for segment in 0..2 {
        let extent = other.allocate(segment, ORDER);
        assert_eq!(other.pages(extent, &[0, 63]), [[0; PAGE_SIZE]; 2]);
    }
    assert_eq!(borrower.pages(held[2], &all_pages()), contents(2));
}

#[test]
fn no_more_is_parked_than_may_be() {
    let mut config = parking(16 * EXTENT_PAGES);
    config.park.as_mut().unwrap().limit = extents(2);
    let (donor, serving) = start_parking(&config);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..5).map(|segment| written(&mut borrower, segment)).collect();
    donor.set_limit(extents(1));
    parked(&donor, 2, 3);
    // Parked pages may be written, and return to the room that they had.
    for (extent, number) in held.iter().zip(10..) {
        write_all(&mut borrower, *extent, number);
    }
    parked(&donor, 2, 3);
    for (extent, number) in held.iter().zip(10..) {
        assert_eq!(borrower.pages(*extent, &all_pages()), contents(number));
    }
}

#[test]
fn the_successor_finds_what_is_parked() {
    let config = parking(16 * EXTENT_PAGES);
    let (donor, serving) = start_parking(&config);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..4).map(|segment| written(&mut borrower, segment)).collect();
    donor.set_limit(extents(1));
    parked(&donor, 3, 1);
    let fds = donor.fds().unwrap();
    let without = donor.fds().unwrap();
    serving.stop();
    drop(donor);

    let without = hecaton_donor::DonorFds { park: None, ..without };
    let error = Donor::open(&config, Some(without)).map(drop).unwrap_err();
    assert!(matches!(error, DonorError::MissingFd("park")), "{error}");
    let donor = Donor::open(&config, Some(fds)).unwrap();
    donor.set_limit(extents(1));
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    parked(&donor, 3, 1);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    for (extent, number) in held.iter().zip(0..) {
        assert_eq!(borrower.pages(*extent, &all_pages()), contents(number));
    }
    donor.set_limit(None);
    parked(&donor, 0, 4);
    for (extent, number) in held.iter().zip(0..) {
        assert_eq!(borrower.pages(*extent, &all_pages()), contents(number));
    }
}

fn states(borrower: &mut Borrower, extent: ExtentId) -> Vec<PageState> {
    let count = EXTENT_PAGES as u32;
    match borrower.call(Request::Verify { extent, first: 0, count }) {
        Outcome::Verified(states) => states,
        other => panic!("not verified but {other:?}"),
    }
}

/// A disk that loses pages loses them by name: what it does not give, or gives wrong, does not
/// match its sum, and is mended from another copy.
#[test]
fn what_the_disk_has_lost_is_seen_and_mended() {
    let (donor, serving) = start_parking(&parking(16 * EXTENT_PAGES));
    let (_other, other_serving) = start(16 * EXTENT_PAGES);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let mut copies = Borrower::connect(other_serving.address(), 1, 1);
    let (held, copy) = (written(&mut borrower, 0), written(&mut copies, 0));
    donor.set_limit(Some(Size(0)));
    parked(&donor, 1, 0);
    let file = File::from(donor.fds().unwrap().park.unwrap());
    // The arena's first pages are the extent's, as nothing else was lent.
    file.write_all_at(&[7; PAGE_SIZE], 3 * PAGE_SIZE as u64).unwrap();
    file.set_len((EXTENT_PAGES - 2) * PAGE_SIZE as u64).unwrap();
    let read = borrower.read(held, &all_pages()).unwrap();
    let broken: Vec<usize> =
        read.iter().enumerate().filter(|(_, (_, whole))| !whole).map(|(at, _)| at).collect();
    assert_eq!(broken, [3, 62, 63]);
    let damaged = states(&mut borrower, held);
    for (at, state) in damaged.iter().enumerate() {
        let sum = page_sum(&page(at as u64));
        let expected = match broken.contains(&at) {
            true => PageState::Damaged(sum),
            false => PageState::Sound(sum),
        };
        assert_eq!(*state, expected, "page {at}");
    }
    assert!(park(&donor).pages_unreadable >= 4);

    let boot = copies.welcome().boot;
    let source = FillSource { extent: copy, boot, address: other_serving.address() };
    let count = EXTENT_PAGES as u32;
    borrower.done(Request::Repair { extent: held, first: 0, count, source });
    assert!(states(&mut borrower, held).iter().all(|state| matches!(state, PageState::Sound(_))));
    assert_eq!(borrower.pages(held, &all_pages()), contents(0));
    parked(&donor, 1, 0);
    assert_eq!(borrower.pages(held, &all_pages()), contents(0));
}

#[test]
fn others_are_filled_from_the_file() {
    let (donor, serving) = start_parking(&parking(16 * EXTENT_PAGES));
    let (_other, other_serving) = start(16 * EXTENT_PAGES);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held = written(&mut borrower, 0);
    donor.set_limit(Some(Size(0)));
    parked(&donor, 1, 0);
    let mut copies = Borrower::connect(other_serving.address(), 1, 1);
    let generation = Generation::FILLING;
    let request = Request::Allocate { segment: 0, member: 0, order: ORDER, generation };
    let Outcome::Allocated(copy) = copies.call(request) else { panic!("not allocated") };
    let boot = borrower.welcome().boot;
    let source = FillSource { extent: held, boot, address: serving.address() };
    let count = EXTENT_PAGES as u32;
    copies.done(Request::Fill { extent: copy, first: 0, count, source });
    assert_eq!(copies.pages(copy, &all_pages()), contents(0));
    borrower.done(Request::Free { extent: held });
    parked(&donor, 0, 0);
}

#[test]
fn a_directory_that_takes_no_file_is_said_before_anything_is_lent() {
    let mut config = parking(16 * EXTENT_PAGES);
    config.park = Some(ParkConfig::new("/proc/self"));
    let error = Donor::open(&config, None).map(drop).unwrap_err();
    assert!(error.to_string().contains("cannot park memory in /proc/self"), "{error}");
    let huge = DonorConfig { huge_pages: true, ..parking(16 * EXTENT_PAGES) };
    assert!(Donor::open(&huge, None).is_err());
}

/// A borrower asks for more than its socket takes and then receives nothing. Pages that are being
/// sent stay in place until they are sent, and no other borrower waits for that.
#[test]
fn memory_is_not_given_back_while_a_read_of_it_is_being_sent() {
    const READS: u64 = 200;
    // The borrower takes nothing for as long as the file needs.
    let patient = DonorConfig { stall: LONG_LEASE, ..parking(16 * EXTENT_PAGES) };
    let (donor, serving) = start_parking(&patient);
    let address = serving.address();
    let mut borrower = Borrower::connect(address, 1, 1);
    let held: Vec<_> = (0..2).map(|segment| written(&mut borrower, segment)).collect();
    let window = WindowLimits { requests: READS as usize, payload_bytes: 64 << 20 };
    let options = Options { window, ..Options::default() };
    let mut slow = Connection::open(address, &hello(1, 1, LONG_LEASE), &options).unwrap();
    for tag in 0..READS {
        slow.submit(tag, Request::Read { extent: held[0], pages: &all_pages() }, &[]).unwrap();
    }
    waits_in_its_socket(&donor);
    donor.set_limit(Some(Size(0)));
    wait_until("the other extent's memory is back", || {
        park(&donor).pages_stored == 2 * EXTENT_PAGES && committed_pages(&donor) <= EXTENT_PAGES
    });
    assert_eq!(committed_pages(&donor), EXTENT_PAGES, "it is still being sent");
    let expected = contents(0);
    let mut pages = 0;
    while pages < READS as usize * all_pages().len() {
        slow.progress(&mut |_, event| {
            let Event::Pages { from, data, .. } = event else { panic!("{event:?}") };
            for (at, page) in data.as_chunks::<PAGE_SIZE>().0.iter().enumerate() {
                assert!(*page == expected[from + at], "not what was stored");
                pages += 1;
            }
        })
        .unwrap();
    }
    parked(&donor, 2, 0);
}

/// Borrowers write and read while extents go to the file and come back, again and again.
#[test]
fn nothing_is_mixed_up_while_extents_move() {
    let (donor, serving) = start_parking(&parking(16 * EXTENT_PAGES));
    let address = serving.address();
    // Until extents have gone both ways, and for some rounds.
    let enough = AtomicBool::new(false);
    let is_enough = || enough.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let borrowers: Vec<_> = (1..4u64)
            .map(|space| {
                let is_enough = &is_enough;
                scope.spawn(move || {
                    let mut borrower = Borrower::connect(address, space, 1);
                    let held: Vec<_> =
                        (0..5).map(|segment| written(&mut borrower, segment)).collect();
                    for round in 0.. {
                        if round >= 150 && is_enough() {
                            break;
                        }
                        let (at, number) = (round % 4, (space * 1000 + round as u64) * 7);
                        write_all(&mut borrower, held[at], number);
                        let other = (at + 1) % 4;
                        // Reads find pages whole while they move.
                        let read = borrower.pages(held[other], &all_pages());
                        let expected = match round {
                            0..3 => other as u64,
                            _ => (space * 1000 + round as u64 - 3) * 7,
                        };
                        assert!(read == contents(expected), "space {space}, round {round}");
                        // One that is only read.
                        let read = borrower.pages(held[4], &all_pages());
                        assert!(read == contents(4), "space {space}, round {round}");
                    }
                })
            })
            .collect();
        let mut limits = [0, 15, 3, 11].into_iter().cycle();
        let give_up = Instant::now() + patience();
        while !borrowers.iter().all(|borrower| borrower.is_finished()) {
            // The threads have all that they need before the limit falls.
            if donor.snapshot().lent_pages == 15 * EXTENT_PAGES {
                donor.set_limit(limits.next().and_then(extents));
            }
            let ParkSnapshot { pages_stored, pages_fetched, .. } = park(&donor);
            let went_both_ways = pages_stored > 0 && pages_fetched > 0;
            enough.store(went_both_ways || Instant::now() > give_up, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let snapshot = park(&donor);
    assert!(snapshot.pages_stored > 0 && snapshot.pages_fetched > 0, "{snapshot:?}");
}
