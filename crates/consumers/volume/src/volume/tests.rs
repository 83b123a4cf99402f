//! Volumes on real donors, in this process.

use super::flow::{Begun, Ended, Flow};
use super::*;
use crate::hand_over::{Fetched, Offer, Offering, fetch};
use crate::{ResizeError, Spill};
use hecaton_donor::{Donor, DonorConfig, Serving};
use hecaton_memory::{Size, random_u64};
use hecaton_space::DonorAddress;
use hecaton_testkit::{patience, wait_for, wait_until};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;

#[derive(Default)]
struct Known(Mutex<BTreeMap<String, SocketAddr>>);

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
    donor: Donor,
    serving: Option<Serving>,
}

impl Lent {
    fn start(name: &str, at: SocketAddr) -> Lent {
        Lent::of(name, at, 8)
    }

    fn of(name: &str, at: SocketAddr, segments: u64) -> Lent {
        let lend = Size(segments * pages_to_bytes(SEGMENT_PAGES));
        let donor = Donor::open(&DonorConfig::new(name, at, lend), None).unwrap();
        let serving = Some(donor.serve(TcpListener::bind(at).unwrap()).unwrap());
        Lent { donor, serving }
    }

    fn address(&self) -> SocketAddr {
        self.serving.as_ref().unwrap().address()
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

    fn is_all_free(&self) -> bool {
        let snapshot = self.donor.snapshot();
        snapshot.free_pages == snapshot.pages
    }
}

pub(crate) struct World {
    pub(crate) donors: Vec<Lent>,
    known: Arc<Known>,
    pub(crate) config: VolumeConfig,
    /// Where spill files are.
    dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn new(donors: usize, copies: u8, pages: u64) -> World {
        World::lending(8, donors, copies, pages)
    }

    /// Where there is no room any more in the pool of [`World::full`], once something is before it.
    pub(crate) const FIRST_WITHOUT_ROOM: u64 = SEGMENT_PAGES * PAGE;

    /// A volume that is larger than the pool.
    pub(crate) fn full() -> World {
        World::lending(1, 1, 1, 2 * SEGMENT_PAGES)
    }

    /// With donors that lend so many segments each.
    fn lending(segments: u64, donors: usize, copies: u8, pages: u64) -> World {
        let anywhere = (Ipv4Addr::LOCALHOST, 0).into();
        let donors: Vec<Lent> =
            (0..donors).map(|number| Lent::of(&format!("d{number}"), anywhere, segments)).collect();
        let known = Arc::new(Known::default());
        for (number, donor) in donors.iter().enumerate() {
            known.0.lock().unwrap().insert(format!("d{number}"), donor.address());
        }
        let config = VolumeConfig {
            name: "disk".into(),
            space: random_u64(),
            pages,
            for_swap: false,
            copies,
            site: Site::default(),
            donors: Vec::new(),
            tls_dir: None,
            lease: Duration::from_secs(30),
            scrub_bytes_per_s: 0,
            copying_bytes_per_s: COPYING_BYTES_PER_S,
            // A busy machine is no reason to take a donor for silent.
            donor_patience: patience(),
            failover: patience(),
            spill: None,
            limit_bytes: None,
            multi_writer: false,
            write_buffer_bytes: None,
            encrypt: false,
            snapshot_of: None,
            reads_from: None,
        };
        World { donors, known, config, dir: tempfile::tempdir().unwrap() }
    }

    /// Its volume has a spill file, and no more than so many segments in the pool.
    fn spilling(mut self, limit: Option<u64>) -> World {
        let copies = u64::from(self.config.copies);
        self.config.spill = Some(self.dir.path().join("spill"));
        self.config.limit_bytes =
            limit.map(|segments| segments * copies * pages_to_bytes(SEGMENT_PAGES));
        self
    }

    /// Its volume has a write buffer.
    pub(crate) fn buffering(mut self, bytes: u64) -> World {
        self.config.write_buffer_bytes = Some(bytes);
        self
    }

    pub(crate) fn scrubbing(mut self, bytes_per_s: u64) -> World {
        self.config.scrub_bytes_per_s = bytes_per_s;
        self
    }

    pub(crate) fn encrypting(mut self, encrypt: bool) -> World {
        self.config.encrypt = encrypt;
        self
    }

    /// Shows `look` each page of a donor that has anything in it, with its place. `look` may change
    /// it. Returns the number of these pages.
    pub(crate) fn each_page_of(
        &self,
        donor: usize,
        mut look: impl FnMut(u64, &mut [u8; PAGE_SIZE]),
    ) -> u64 {
        let donor = &self.donors[donor].donor;
        let memory = File::from(donor.fds().unwrap().arena);
        let mut page = [0; PAGE_SIZE];
        let found = (0..donor.snapshot().pages).filter(|at| {
            memory.read_exact_at(&mut page, pages_to_bytes(*at)).unwrap();
            let before = page;
            if is_zero(&before) {
                return false;
            }
            look(*at, &mut page);
            if page != before {
                memory.write_all_at(&page, pages_to_bytes(*at)).unwrap();
            }
            true
        });
        found.count() as u64
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn stop(&mut self, donor: usize) {
        self.donors[donor].stop();
    }

    pub(crate) fn volume(&self) -> Arc<Volume> {
        let spill = self.config.spill.as_ref().map(|path| Spill::create(path).unwrap());
        let state = State::create(self.config.pages).unwrap().with_spill(spill);
        Volume::open(self.config.clone(), self.known.clone(), state).unwrap()
    }

    /// The one that comes after a process that was killed.
    pub(crate) fn successor(&self, volume: &Volume) -> Arc<Volume> {
        die(volume);
        let fd = volume.state.as_fd().try_clone_to_owned().unwrap();
        let spill = volume.state.spill.as_ref().map(|spill| {
            let fd = spill.as_fd().try_clone_to_owned().unwrap();
            Spill::from_fd(fd, self.config.spill.as_ref().unwrap())
        });
        let state = State::from_fd(fd).unwrap().with_spill(spill);
        Volume::open(self.config.clone(), self.known.clone(), state).unwrap()
    }
}

/// As a process that is killed: what it is in the middle of is over when this returns.
pub(crate) fn die(volume: &Volume) {
    volume.is_over.store(true, Release);
    wait_until("it stands still", || {
        volume.buffer.as_ref().is_none_or(Buffer::is_closed)
            && volume.stats(0).unsettled == 0
            && volume.locks.lock(0..MAX_PAGES, Access::Exclusive).is_ok()
    });
}

pub(crate) fn read(volume: &Volume, offset: u64, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0xee; bytes];
    volume.read(offset, &mut buffer).unwrap();
    buffer
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Zeroes(u64, usize, bool),
    Trim(u64, usize),
    Read(u64, usize),
    Succeed,
    Flush,
    Resize(u64),
    /// Pages that it may have, and pages that are taken back.
    Target(Option<u64>, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Around the end of a segment, and the volume's.
    let offset = prop_oneof![
        0..40_000u64,
        SEGMENT_PAGES * PAGE - 30_000..SEGMENT_PAGES * PAGE + 30_000,
        SEGMENT_PAGES * PAGE + 60_000..(SEGMENT_PAGES + 20) * PAGE,
    ];
    let bytes = prop_oneof![1..600usize, 1..20_000usize, Just(4096), Just(512)];
    let step =
        (0..12u8, offset, bytes, any::<u8>()).prop_map(|(kind, at, bytes, fill)| match kind {
            0..=4 => Step::Write(at, bytes, fill),
            5 => Step::Zeroes(at, bytes, fill % 2 == 0),
            6 => Step::Trim(at, bytes),
            7 if fill < 60 => Step::Succeed,
            7 if fill < 120 => Step::Resize(bytes as u64 % 40),
            7 if fill < 180 => Step::Flush,
            // Whole segments go.
            8 if fill < 60 => Step::Trim(0, usize::MAX),
            9 if fill < 120 => Step::Target((fill < 80).then_some(at % 40), bytes as u64 % 60),
            _ => Step::Read(at, bytes),
        });
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn reads_show_what_was_written_at_any_byte(
        steps in steps(), copies in 1..3u8, limit in prop::option::of(0..3u64),
        buffer in prop::option::of(1..200u64), encrypt in any::<bool>(),
    ) {
        let mut size = (SEGMENT_PAGES + 20) * PAGE;
        let mut world = World::new(2, copies, SEGMENT_PAGES + 20).encrypting(encrypt);
        if limit.is_some() {
            world = world.spilling(limit);
        }
        if let Some(pages) = buffer {
            world = world.buffering(pages * PAGE);
        }
        let mut volume = world.volume();
        let mut model = vec![0u8; size as usize];
        for step in steps {
            // A request beyond the end is refused.
            if let Step::Write(at, ..) | Step::Zeroes(at, ..) | Step::Trim(at, _) | Step::Read(at, _) =
                step
                && at >= size
            {
                let beyond = volume.write(at, &[1]);
                let is_refused = matches!(beyond, Err(BlockError::Beyond { .. }));
                prop_assert!(is_refused);
                continue;
            }
            let fit = |at: u64, bytes: usize| bytes.min((size - at) as usize);
            match step {
                Step::Write(at, bytes, fill) => {
                    let data: Vec<u8> = (0..fit(at, bytes)).map(|i| fill.wrapping_add(i as u8)).collect();
                    volume.write(at, &data).unwrap();
                    model[at as usize..at as usize + data.len()].copy_from_slice(&data);
                }
                Step::Zeroes(at, bytes, allocate) => {
                    let bytes = fit(at, bytes);
                    volume.write_zeroes(at, bytes as u64, allocate).unwrap();
                    model[at as usize..at as usize + bytes].fill(0);
                }
                Step::Trim(at, bytes) => {
                    let bytes = fit(at, bytes) as u64;
                    volume.trim(at, bytes).unwrap();
                    let whole = at.next_multiple_of(PAGE)..(at + bytes) / PAGE * PAGE;
                    if !whole.is_empty() {
                        model[whole.start as usize..whole.end as usize].fill(0);
                    }
                }
                Step::Read(at, bytes) => {
                    let bytes = fit(at, bytes);
                    let found = read(&volume, at, bytes);
                    prop_assert!(found == model[at as usize..at as usize + bytes], "at {at}");
                }
                Step::Succeed => volume = world.successor(&volume),
                Step::Flush => volume.flush().unwrap(),
                Step::Target(pages, wanted) => {
                    volume.set_target(pages.map(|pages| pages * PAGE), 0);
                    if let (Some(places), Some(spill)) = (&volume.places, &volume.state.spill) {
                        departures::take_out(&volume, places, spill, wanted, Duration::ZERO);
                    }
                }
                Step::Resize(pages) => {
                    let wanted = (SEGMENT_PAGES + pages) * PAGE;
                    let kept = model.get(wanted as usize..).unwrap_or_default();
                    match volume.resize(wanted / PAGE) {
                        Ok(()) => {
                            prop_assert!(is_zero(kept));
                            size = wanted;
                            model.resize(size as usize, 0);
                        }
                        // Zeros may be kept, too.
                        Err(ResizeError::InUse { end, .. }) => {
                            prop_assert!(wanted < size && end > wanted && end <= size);
                        }
                        Err(error) => panic!("{error}"),
                    }
                    prop_assert_eq!(volume.size_bytes(), size);
                }
            }
        }
        prop_assert!(read(&volume, 0, size as usize) == model);
        let told = volume.extents(0, size, usize::MAX).unwrap();
        let mut at = 0;
        for extent in told {
            let bytes = at..at + extent.bytes as usize;
            prop_assert!(extent.contents == Contents::Data || is_zero(&model[bytes.clone()]));
            at = bytes.end;
        }
        volume.flush().unwrap();
        prop_assert!(read(&volume, 0, size as usize) == model);
        let stats = volume.stats(0);
        let data = model.chunks(PAGE_SIZE).filter(|page| !is_zero(page)).count() as u64;
        let is_told = stats.data_bytes >= pages_to_bytes(data) && stats.unkept_bytes == 0;
        prop_assert!(is_told && stats.spilled_bytes <= stats.data_bytes, "{data} pages: {stats:?}");
        let most = limit.map_or(u64::MAX, |limit| limit * SEGMENT_PAGES * PAGE);
        prop_assert!(stats.pool.segments_held * SEGMENT_PAGES * PAGE <= most);
        volume.release().unwrap();
        wait_until("all is free", || world.donors.iter().all(Lent::is_all_free));
    }
}

#[test]
fn writers_of_one_page_do_not_lose_each_others_bytes() {
    let world = World::new(1, 1, 64);
    let volume = world.volume();
    thread::scope(|scope| {
        for thread in 0..8u64 {
            let volume = &volume;
            scope.spawn(move || {
                for turn in 1..=100u64 {
                    let fill = [(thread * 31 + turn) as u8; 512];
                    // The same sector of one of four pages; all threads have all of them.
                    let at = turn % 4 * PAGE + thread * 512;
                    volume.write(at, &fill).unwrap();
                    let mut found = [0; 512];
                    volume.read(at, &mut found).unwrap();
                    assert_eq!(found, fill);
                }
            });
        }
    });
    for page in 0..4 {
        for thread in 0..8 {
            let turn = (97..=100).find(|turn| turn % 4 == page).unwrap();
            let expected = [(thread * 31 + turn) as u8; 512];
            assert_eq!(read(&volume, page * PAGE + thread * 512, 512), expected);
        }
    }
}

#[test]
fn a_successor_finishes_what_was_under_way() {
    let world = World::new(2, 2, 100);
    let volume = world.volume();
    volume.write(0, &[1; 3 * PAGE_SIZE]).unwrap();
    // As if the process was killed before anything of it was sent.
    for (slot, page) in [(7, 1), (9, 50)] {
        volume.state.fill(slot, page, &[2; PAGE_SIZE]);
    }
    let successor = world.successor(&volume);
    wait_until("it is settled", || successor.stats(0).unsettled == 0);
    let expected = [[1; PAGE_SIZE], [2; PAGE_SIZE], [1; PAGE_SIZE]].concat();
    assert!(read(&successor, 0, 3 * PAGE_SIZE) == expected);
    assert!(read(&successor, 50 * PAGE, PAGE_SIZE) == [2; PAGE_SIZE]);
    assert_eq!(successor.stats(0).data_bytes, 4 * PAGE);
    assert!(matches!(volume.write(0, &[3; 512]), Err(BlockError::Over)), "it is fenced");
}

/// In each page that is written.
const MARK: &[u8] = b"hecaton: nobody but me may read this";

/// So many pages, which show the mark and are all different.
fn marked(pages: u64) -> Vec<u8> {
    let mut bytes = vec![0; pages_to_bytes(pages) as usize];
    for (number, page) in (1..=pages).zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
        page[..8].copy_from_slice(&number.to_le_bytes());
        page[9..9 + MARK.len()].copy_from_slice(MARK);
    }
    bytes
}

fn shows_the_mark(bytes: &[u8]) -> bool {
    bytes.windows(MARK.len()).any(|window| window == MARK)
}

#[test]
fn neither_donors_nor_the_disk_have_what_can_be_read() {
    const PAGES: u64 = 40;
    for encrypt in [false, true] {
        // One of two segments is in the pool, the other in the file.
        let world = World::lending(1, 2, 2, 2 * SEGMENT_PAGES).spilling(None).encrypting(encrypt);
        let volume = world.volume();
        let (data, second) = (marked(PAGES), SEGMENT_PAGES * PAGE);
        for at in [0, second] {
            volume.write(at, &data).unwrap();
            // A part of a page is written with the rest of it.
            volume.write(at + 3 * PAGE + 100, &[7; 5]).unwrap();
        }
        let expected = {
            let mut data = data.clone();
            data[3 * PAGE_SIZE + 100..][..5].fill(7);
            data
        };
        let kept = |volume: &Volume| {
            [0, second].iter().all(|at| read(volume, *at, expected.len()) == expected)
        };
        let shown = || {
            let mut pages = 0;
            for donor in 0..2 {
                let held = world.each_page_of(donor, |_, page| {
                    pages += u64::from(shows_the_mark(page));
                });
                assert_eq!(held, PAGES, "each donor has each page");
            }
            pages
        };
        assert_eq!(volume.stats(0).spilled_bytes, PAGES * PAGE);
        assert!(kept(&volume));
        assert_eq!(shown(), if encrypt { 0 } else { 2 * PAGES });
        let file = std::fs::read(world.config.spill.as_ref().unwrap()).unwrap();
        assert_eq!(shows_the_mark(&file[second as usize..]), !encrypt);
        // A segment comes back from the file without a key, and unchanged.
        let volume = world.successor(&volume);
        volume.trim(0, second).unwrap();
        wait_until("it is back", || volume.stats(0).spilled_bytes == 0);
        assert!(read(&volume, second, expected.len()) == expected);
        assert_eq!(shown(), if encrypt { 0 } else { 2 * PAGES });
    }
}

#[test]
fn a_successor_opens_what_was_stored_whenever_its_predecessor_was_killed() {
    let world = World::new(2, 2, 100).encrypting(true);
    let mut volume = world.volume();
    volume.write(0, &[1; 3 * PAGE_SIZE]).unwrap();
    // Kill points: before sending, before noting, after half of the seal, all of it, or the word.
    for step in 0..5u8 {
        let contents = [2 + step; PAGE_SIZE];
        let item = Item { page: 1, sum: page_sum(&contents), contents: &contents };
        let (seals, before) = (volume.state.seals(), volume.state.seals().get(1));
        let slot = volume.slots.take(1)[0];
        volume.state.fill(slot, 1, &contents);
        let sealed = Sealed::of(&[item], volume.sealer.as_deref().unwrap(), seals);
        let seal = sealed.seals[0];
        if step > 0 {
            let mut lane = volume.lanes.take().unwrap();
            store(&mut lane, &sealed.items(&[item]), false, |_, fate| {
                assert!(matches!(fate, Fate::Stored(_)), "{fate:?}");
            });
        }
        match step {
            0 | 1 => {}
            2 => seals.set(1, &hecaton_space::seal::Seal { tag: before.tag, ..seal }),
            _ => seals.set(1, &seal),
        }
        if step == 4 {
            let word = word_of(sealed.items(&[item])[0].sum);
            volume.state.set_page(1, Page::Data(word));
        }
        volume = world.successor(&volume);
        wait_until("it is settled", || volume.stats(0).unsettled == 0);
        let expected = [[1; PAGE_SIZE], contents, [1; PAGE_SIZE]].concat();
        assert!(read(&volume, 0, 3 * PAGE_SIZE) == expected, "killed at step {step}");
        assert!(volume.state.seals().get(1).version > seal.version, "no version is used twice");
        assert!(!is_anything_named(&volume));
    }
}

#[test]
fn a_write_that_changed_nothing_leaves_the_page_that_opened() {
    let world = World::new(1, 1, SEGMENT_PAGES).spilling(Some(0)).encrypting(true);
    let volume = world.volume();
    volume.write(0, &marked(2)).unwrap();
    // A disk that takes nothing any more.
    let path = world.config.spill.as_ref().unwrap();
    let spill = Spill::from_fd(File::open(path).unwrap().into(), path);
    let fd = volume.state.as_fd().try_clone_to_owned().unwrap();
    let state = State::from_fd(fd).unwrap().with_spill(Some(spill));
    let volume = Volume::open(world.config.clone(), world.known.clone(), state).unwrap();
    let refused = volume.write(0, &[1; 2 * PAGE_SIZE]);
    assert!(matches!(refused, Err(BlockError::Spill(_))), "{refused:?}");
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == marked(2));
    assert_eq!(volume.stats(0).unkept_bytes, 0);
}

/// Changes some bits of a page such that its CRC32C stays what it was: those of the generator
/// polynomial (RFC 3720, 12.1), lowest bits first.
fn alter_with_the_same_sum(page: &mut [u8]) {
    const GENERATOR: u64 = 0x1_1edc_6f41;
    let before = page_sum(page);
    for bit in 0..33 {
        page[700 + bit / 8] ^= ((GENERATOR >> (32 - bit) & 1) as u8) << (bit % 8);
    }
    assert_eq!(page_sum(page), before);
}

#[test]
fn what_a_donor_alters_is_found_though_the_sum_fits() {
    const PAGES: u64 = 20;
    let world = World::new(2, 2, 100).encrypting(true);
    let volume = world.volume();
    volume.write(0, &marked(PAGES)).unwrap();
    // One of two copies is right: half of the pages each, whichever donor a lane prefers.
    for donor in 0..2 {
        let held = world.each_page_of(donor, |at, page| {
            if at % 2 == donor as u64 {
                alter_with_the_same_sum(page);
            }
        });
        assert_eq!(held, PAGES);
    }
    assert!(read(&volume, 0, (PAGES * PAGE) as usize) == marked(PAGES));
    // Now neither is right in one half of them.
    world.each_page_of(0, |at, page| {
        if at % 2 == 1 {
            alter_with_the_same_sum(page);
        }
    });
    let is_damaged = |page: u64| {
        let found = volume.read(page * PAGE, &mut [0; PAGE_SIZE]);
        let is_damaged = matches!(found, Err((_, BlockError::Damaged(which))) if which == page);
        assert!(found.is_ok() || is_damaged, "{found:?}");
        is_damaged
    };
    assert_eq!((0..PAGES).filter(|page| is_damaged(*page)).count() as u64, PAGES / 2);
    // Parts of such a page cannot be written; all of it can.
    let page = (0..PAGES).find(|page| is_damaged(*page)).unwrap();
    assert!(volume.write(page * PAGE + 9, &[5; 9]).is_err());
    volume.write(page * PAGE, &[5; PAGE_SIZE]).unwrap();
    assert!(read(&volume, page * PAGE, PAGE_SIZE) == [5; PAGE_SIZE]);
}

#[test]
fn an_older_page_and_one_of_another_place_are_found() {
    let world = World::new(1, 1, 100).encrypting(true);
    let volume = world.volume();
    let held = || {
        let mut held = BTreeMap::new();
        world.each_page_of(0, |at, page| {
            held.insert(at, *page);
        });
        held
    };
    let give = |pages: &BTreeMap<u64, [u8; PAGE_SIZE]>| {
        world.each_page_of(0, |at, page| *page = pages[&at]);
    };
    volume.write(0, &marked(2)).unwrap();
    let older = held();
    // The same contents, too, are another version.
    volume.write(0, &marked(2)).unwrap();
    let newer = held();
    let mut swapped = newer.clone();
    let [first, second]: [u64; 2] = newer.keys().copied().collect::<Vec<_>>().try_into().unwrap();
    assert!(older[&first] != newer[&first] && older[&second] != newer[&second]);
    swapped.insert(first, newer[&second]);
    swapped.insert(second, newer[&first]);
    for wrong in [older, swapped] {
        give(&wrong);
        for page in 0..2 {
            let found = volume.read(page * PAGE, &mut [0; PAGE_SIZE]);
            assert!(matches!(found, Err((_, BlockError::Damaged(_)))), "{found:?}");
        }
    }
    give(&newer);
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == marked(2));
}

#[test]
fn what_is_lost_fails_and_nothing_else_does() {
    let mut world = World::new(2, 1, 2 * SEGMENT_PAGES);
    let volume = world.volume();
    let second = SEGMENT_PAGES * PAGE;
    for at in [0, second] {
        volume.write(at, &[5; 8192]).unwrap();
    }
    // A segment for each donor; one donor comes back with empty memory.
    let address = world.donors[0].stop();
    world.donors[0] = Lent::start("d0", address);
    let is_lost = |at: u64| volume.read(at, &mut [0; 4096]).is_err();
    wait_until("one segment is lost", || is_lost(0) || is_lost(second));
    let (lost, kept) = if is_lost(0) { (0, second) } else { (second, 0) };
    assert!(read(&volume, kept, 8192) == [5; 8192]);
    assert_eq!(volume.read(lost + 100, &mut [0; 8192]).unwrap_err().0, lost + 100);
    assert_eq!(read(&volume, lost + 8192, 512), [0; 512], "it never was written");
    assert!(volume.write(lost, &[6; 4096]).is_err(), "the rest would be zeros");
    // A segment that is given up is as new.
    volume.trim(lost, second).unwrap();
    volume.write(lost, &[6; 4096]).unwrap();
    assert_eq!(read(&volume, lost, 4097)[4095..], [6, 0]);
}

#[test]
fn a_write_to_a_donor_that_is_away_fails_and_is_settled_when_it_is_back() {
    for encrypt in [false, true] {
        is_settled_when_it_is_back(World::new(1, 1, 100).encrypting(encrypt));
    }
}

fn is_settled_when_it_is_back(mut world: World) {
    world.config.donor_patience = Duration::from_secs(5);
    let volume = world.volume();
    volume.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
    let address = world.donors[0].stop();
    assert!(volume.write(0, &[2; 2 * PAGE_SIZE]).is_err());
    assert!(volume.read(2 * PAGE, &mut [0; PAGE_SIZE]).is_err());
    world.donors[0].serve_again(address);
    wait_until("it is settled", || volume.stats(0).unsettled == 0);
    wait_until("it is reached", || volume.read(0, &mut [0; 512]).is_ok());
    let first = read(&volume, 0, 4 * PAGE_SIZE);
    assert!(first[..PAGE_SIZE] == [1; PAGE_SIZE] || first[..PAGE_SIZE] == [2; PAGE_SIZE]);
    assert!(first[..PAGE_SIZE] == first[PAGE_SIZE..2 * PAGE_SIZE], "one request, one fate");
    assert!(first[2 * PAGE_SIZE..] == [1; 2 * PAGE_SIZE]);
    volume.write(0, &[3; PAGE_SIZE]).unwrap();
    assert!(read(&volume, 0, PAGE_SIZE) == [3; PAGE_SIZE]);
}

#[test]
fn with_two_copies_a_donor_dies_unnoticed() {
    let mut world = World::new(3, 2, 2000);
    let volume = world.volume();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for thread in 0..3u64 {
            let (volume, is_done) = (&volume, &is_done);
            scope.spawn(move || {
                let mut turn = 0;
                while !is_done.load(Acquire) || turn < 300 {
                    turn += 1;
                    let at = (thread * 600 + turn * 7 % 500) * PAGE;
                    let data = [turn as u8; PAGE_SIZE];
                    volume.write(at, &data).unwrap();
                    assert!(read(volume, at, PAGE_SIZE) == data);
                }
            });
        }
        let further_writes = |count: u64| {
            let goal = volume.stats(0).writes + count;
            wait_for(&format!("{goal} writes"), patience(), || match volume.stats(0).writes {
                writes if writes >= goal => Ok(()),
                writes => Err(format!("{writes} writes")),
            })
        };
        let begun = further_writes(100);
        world.donors[0].stop();
        world.known.0.lock().unwrap().remove("d0");
        let gone_on = further_writes(1000);
        is_done.store(true, Release);
        begun.and(gone_on).unwrap();
    });
    assert_eq!(volume.stats(0).errors, 0);
}

#[test]
fn a_successor_knows_a_copy_of_kept_zeros_that_was_made_anew() {
    let mut world = World::new(3, 2, 100);
    let volume = world.volume();
    volume.write_zeroes(0, 20 * PAGE, true).unwrap();
    volume.write(30 * PAGE, &[1; PAGE_SIZE]).unwrap();
    // Both that have it from the client go, one after the other.
    let lenders: Vec<usize> = (0..3).filter(|at| !world.donors[*at].is_all_free()).collect();
    assert_eq!(lenders.len(), 2);
    for lender in lenders {
        wait_until("there are two copies", || volume.stats(0).pool.segments_degraded == 0);
        world.stop(lender);
        world.known.0.lock().unwrap().remove(&format!("d{lender}"));
        volume.write(31 * PAGE, &[2; PAGE_SIZE]).unwrap();
    }
    let successor = world.successor(&volume);
    assert!(read(&successor, 0, 20 * PAGE_SIZE).iter().all(|byte| *byte == 0));
    assert!(read(&successor, 30 * PAGE, PAGE_SIZE) == [1; PAGE_SIZE]);
    assert!(read(&successor, 31 * PAGE, PAGE_SIZE) == [2; PAGE_SIZE]);
}

#[test]
fn a_volume_shrinks_to_what_is_in_use() {
    let world = World::new(1, 1, 2 * SEGMENT_PAGES);
    let volume = world.volume();
    let end = SEGMENT_PAGES * PAGE;
    volume.write(end + 5 * PAGE, &[1; 2 * PAGE_SIZE]).unwrap();
    let refused = volume.resize(SEGMENT_PAGES).unwrap_err();
    assert!(matches!(refused, ResizeError::InUse { bytes, end: used }
        if bytes == 2 * PAGE && used == end + 7 * PAGE));
    assert!(volume.resize(0).is_err() && volume.resize(MAX_PAGES + 1).is_err());
    volume.resize(SEGMENT_PAGES + 7).unwrap();
    volume.trim(end, 7 * PAGE).unwrap();
    wait_until("its segment is free", || world.donors[0].is_all_free());
    volume.resize(1).unwrap();
    assert!(matches!(volume.write(PAGE, &[1; 512]), Err(BlockError::Beyond { .. })));
    // A successor knows the size that it was given last.
    volume.resize(3 * SEGMENT_PAGES).unwrap();
    let volume = world.successor(&volume);
    assert_eq!(volume.stats(0).pool.segments, 3);
    volume.write(3 * end - PAGE, &[2; PAGE_SIZE]).unwrap();
    assert!(read(&volume, 3 * end - PAGE, PAGE_SIZE) == [2; PAGE_SIZE]);
}

#[test]
fn what_the_pool_has_no_room_for_is_spilled_and_comes_back() {
    let world = World::lending(2, 1, 1, 4 * SEGMENT_PAGES).spilling(None);
    let mut volume = world.volume();
    let segment = SEGMENT_PAGES * PAGE;
    let data = |number: u64| vec![number as u8 + 1; 3 * PAGE_SIZE];
    for number in 0..4 {
        volume.write(number * segment + 700, &data(number)).unwrap();
    }
    let kept = |volume: &Volume, numbers: Range<u64>| {
        numbers.clone().all(|number| {
            read(volume, number * segment + 700, 3 * PAGE_SIZE) == data(number)
                && read(volume, number * segment, 700) == [0; 700]
        })
    };
    // Four pages of each: three and parts of two.
    assert_eq!(volume.stats(0).spilled_bytes, 2 * 4 * PAGE);
    assert!(kept(&volume, 0..4));
    volume.flush().unwrap();
    volume = world.successor(&volume);
    assert_eq!(volume.stats(0).spilled_bytes, 2 * 4 * PAGE);
    assert!(kept(&volume, 0..4));
    // Room for one.
    volume.trim(0, segment).unwrap();
    wait_until("one is back", || volume.stats(0).spilled_bytes == 4 * PAGE);
    assert!(kept(&volume, 1..4));
    volume = world.successor(&volume);
    assert!(kept(&volume, 1..4));
    volume.trim(segment, segment).unwrap();
    wait_until("all are back", || volume.stats(0).spilled_bytes == 0);
    assert!(kept(&volume, 2..4));
    let path = world.config.spill.as_ref().unwrap();
    let taken = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
    wait_until("the file takes no room", || taken() == 0);
    volume.release().unwrap();
    assert!(!path.exists());
    wait_until("all is free", || world.donors[0].is_all_free());
}

#[test]
fn a_volume_takes_no_more_of_the_pool_than_its_limit() {
    let world = World::new(2, 2, 6 * SEGMENT_PAGES).spilling(Some(2));
    let volume = world.volume();
    thread::scope(|scope| {
        for number in 0..6 {
            let volume = &volume;
            scope.spawn(move || {
                volume.write(number * SEGMENT_PAGES * PAGE, &[9; PAGE_SIZE]).unwrap();
            });
        }
    });
    // Longer than one look for room takes.
    for _ in 0..15 {
        thread::sleep(Duration::from_millis(100));
        let stats = volume.stats(0);
        assert!(stats.pool.segments_held <= 2 && stats.spilled_bytes >= 4 * PAGE);
    }
}

#[test]
fn a_volume_at_its_target_writes_to_its_file_and_one_that_may_have_more_brings_it_back() {
    let world = World::new(2, 2, 6 * SEGMENT_PAGES).spilling(None);
    let volume = world.volume();
    let segment = SEGMENT_PAGES * PAGE;
    let puts = |volume: &Volume| {
        let stats = volume.stats(0);
        (stats.puts_total, stats.puts_succeeded)
    };
    volume.set_target(Some(3 * PAGE), 0);
    assert_eq!(volume.stats(0).target_bytes, Some(3 * PAGE));
    volume.write(0, &[1; 2 * PAGE_SIZE]).unwrap();
    volume.write(segment, &[2; 2 * PAGE_SIZE]).unwrap();
    assert_eq!(puts(&volume), (4, 4), "the segment in which it comes to its target included");
    volume.write(2 * segment, &[3; 2 * PAGE_SIZE]).unwrap();
    let stats = volume.stats(0);
    assert_eq!((stats.spilled_bytes, stats.pool_bytes()), (2 * PAGE, 4 * PAGE));
    assert_eq!(puts(&volume), (6, 4));
    // A page that is read from the file counts as a put, too.
    assert!(read(&volume, 2 * segment, PAGE_SIZE) == [3; PAGE_SIZE]);
    assert_eq!((puts(&volume), volume.stats(0).gets), ((7, 4), 0));
    assert!(read(&volume, 0, PAGE_SIZE) == [1; PAGE_SIZE]);
    assert_eq!((puts(&volume), volume.stats(0).gets), ((7, 4), 1));
    // Room for one page is none for two.
    volume.set_target(Some(5 * PAGE), 0);
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(volume.stats(0).spilled_bytes, 2 * PAGE);
    volume.set_target(Some(6 * PAGE), 0);
    wait_until("it is back", || volume.stats(0).spilled_bytes == 0);
    assert!(read(&volume, 2 * segment, 2 * PAGE_SIZE) == [3; 2 * PAGE_SIZE]);
    volume.set_target(None, 0);
    volume.write(3 * segment, &[4; PAGE_SIZE]).unwrap();
    assert_eq!((volume.stats(0).spilled_bytes, volume.stats(0).target_bytes), (0, None));
}

#[test]
fn what_its_own_limit_keeps_out_of_the_pool_is_no_want() {
    let world = World::new(1, 1, 3 * SEGMENT_PAGES).spilling(Some(1));
    let volume = world.volume();
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    volume.write(SEGMENT_PAGES * PAGE, &[2; PAGE_SIZE]).unwrap();
    assert!(read(&volume, SEGMENT_PAGES * PAGE, PAGE_SIZE) == [2; PAGE_SIZE]);
    let stats = volume.stats(0);
    assert_eq!((stats.spilled_bytes, stats.puts_total, stats.puts_succeeded), (PAGE, 1, 1));
}

#[test]
fn a_volume_without_a_file_has_no_target() {
    let world = World::new(1, 1, 3 * SEGMENT_PAGES);
    let volume = world.volume();
    volume.set_target(Some(0), 1 << 20);
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    assert!(read(&volume, 0, PAGE_SIZE) == [1; PAGE_SIZE]);
    let stats = volume.stats(0);
    assert_eq!((stats.target_bytes, stats.puts_succeeded, stats.gets), (None, 1, 1));
}

#[test]
fn what_is_taken_back_goes_to_the_file_the_longest_unused_first() {
    let world = World::new(2, 2, 6 * SEGMENT_PAGES).spilling(None);
    let mut volume = world.volume();
    let segment = SEGMENT_PAGES * PAGE;
    let data = |number: u64| vec![number as u8 + 1; 3 * PAGE_SIZE];
    for number in 0..4 {
        volume.write(number * segment + 700, &data(number)).unwrap();
    }
    let kept = |volume: &Volume| {
        (0..4).all(|number| read(volume, number * segment + 700, 3 * PAGE_SIZE) == data(number))
    };
    let take = |volume: &Arc<Volume>, pages, idle| {
        let (places, spill) = (volume.places.as_ref().unwrap(), volume.state.spill.as_ref());
        departures::take_out(volume, places, spill.unwrap(), pages, idle)
    };
    // The volume's clock counts seconds: the others are used in a later second than the second one.
    wait_until("all segments are idle for a second", || {
        volume.places.as_ref().unwrap().idle(Duration::from_secs(1)).len() == 4
    });
    for number in [0, 2, 3] {
        assert!(read(&volume, number * segment + 700, PAGE_SIZE)[0] == number as u8 + 1);
    }
    volume.set_target(Some(13 * PAGE), 0);
    assert!(take(&volume, 3, Duration::from_secs(1000)).is_empty());
    assert_eq!(volume.stats(0).taken_back_bytes, 0, "nothing was idle for so long");
    assert!(take(&volume, 3, Duration::ZERO).is_empty(), "all extents are given back");
    let stats = volume.stats(0);
    assert_eq!((stats.taken_back_bytes, stats.spilled_bytes), (4 * PAGE, 4 * PAGE));
    assert_eq!(volume.places.as_ref().unwrap().get(1), Place::Spill, "it was not used for longest");
    assert_eq!(stats.pool.segments_held, 3);
    assert!(kept(&volume));
    // A successor finds it there, writes to it there, and takes more out.
    volume = world.successor(&volume);
    assert_eq!(volume.stats(0).spilled_bytes, 4 * PAGE);
    volume.set_target(Some(0), 0);
    volume.write(segment + 700, &data(1)).unwrap();
    assert!(kept(&volume) && volume.stats(0).spilled_bytes == 4 * PAGE);
    assert!(take(&volume, u64::MAX, Duration::ZERO).is_empty());
    assert_eq!(volume.stats(0).pool_bytes(), 0);
    wait_until("no donor has anything", || world.donors.iter().all(Lent::is_all_free));
    assert!(kept(&volume));
    volume.set_target(None, 0);
    wait_until("all is back", || volume.stats(0).spilled_bytes == 0);
    assert!(kept(&volume));
    volume = world.successor(&volume);
    assert!(kept(&volume) && volume.stats(0).spilled_bytes == 0);
}

#[test]
fn who_dies_between_disk_and_donors_leaves_a_segment_in_the_file() {
    let world = World::new(2, 2, 3 * SEGMENT_PAGES).spilling(None);
    let mut volume = world.volume();
    let data = [1; 2 * PAGE_SIZE];
    volume.write(0, &data).unwrap();
    let (places, spill) = (volume.places.as_ref().unwrap(), volume.state.spill.as_ref().unwrap());
    assert_eq!(departures::copy_out(&volume, places, spill, 0).unwrap(), 2);
    assert_eq!(volume.stats(0).pool.segments_held, 1, "its extents are not given back yet");
    volume = world.successor(&volume);
    volume.set_target(Some(0), 0);
    assert_eq!(volume.stats(0).spilled_bytes, 2 * PAGE);
    wait_until("they are", || world.donors.iter().all(Lent::is_all_free));
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == data);
    volume.set_target(None, 0);
    wait_until("it is back", || volume.stats(0).spilled_bytes == 0);
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == data);
    volume = world.successor(&volume);
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == data);
}

/// With the thread that does it, and its seconds.
#[test]
fn what_lies_idle_goes_when_the_policy_wants_it_and_what_is_used_stays() {
    let world = World::new(1, 1, 3 * SEGMENT_PAGES).spilling(None);
    let volume = world.volume();
    let segment = SEGMENT_PAGES * PAGE;
    volume.write(0, &[1; 2 * PAGE_SIZE]).unwrap();
    volume.write(segment, &[2; 2 * PAGE_SIZE]).unwrap();
    wait_until("the idle one goes", || {
        volume.set_target(Some(PAGE), u64::MAX);
        assert!(read(&volume, segment, PAGE_SIZE) == [2; PAGE_SIZE]);
        volume.stats(0).taken_back_bytes > 0
    });
    assert_eq!(volume.places.as_ref().unwrap().get(0), Place::Spill);
    assert_eq!(volume.places.as_ref().unwrap().get(1), Place::Pool);
    assert!(read(&volume, 0, 2 * PAGE_SIZE) == [1; 2 * PAGE_SIZE]);
}

#[test]
fn what_a_disk_does_not_take_back_stays_in_the_pool() {
    let world = World::new(1, 1, 3 * SEGMENT_PAGES).spilling(None);
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let spill = Spill::from_fd(full.into(), world.config.spill.as_ref().unwrap());
    let state = State::create(world.config.pages).unwrap().with_spill(Some(spill));
    let volume = Volume::open(world.config.clone(), world.known.clone(), state).unwrap();
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    let (places, spill) = (volume.places.as_ref().unwrap(), volume.state.spill.as_ref().unwrap());
    assert!(departures::take_out(&volume, places, spill, 1, Duration::ZERO).is_empty());
    assert!(read(&volume, 0, PAGE_SIZE) == [1; PAGE_SIZE]);
    let stats = volume.stats(0);
    assert_eq!((stats.spilled_bytes, stats.taken_back_bytes, stats.errors), (0, 0, 0));
}

#[test]
fn a_disk_that_is_full_or_wrong_is_an_error_and_nothing_else() {
    let world = World::lending(1, 1, 1, 3 * SEGMENT_PAGES).spilling(None);
    let volume = world.volume();
    let second = SEGMENT_PAGES * PAGE;
    volume.write(0, &[1; 2 * PAGE_SIZE]).unwrap();
    volume.write(second, &[2; 2 * PAGE_SIZE]).unwrap();
    let path = world.config.spill.as_ref().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7], second + PAGE).unwrap();
    let (at, error) = volume.read(second, &mut [0; 2 * PAGE_SIZE]).unwrap_err();
    assert!(at == second + PAGE && matches!(error, BlockError::Damaged(_)));
    assert_eq!(read(&volume, second, 512), [2; 512]);
    // A damaged page is not brought back, and is whole again after a write.
    volume.trim(0, second).unwrap();
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(volume.stats(0).spilled_bytes, 2 * PAGE);
    volume.write(second + PAGE, &[3; PAGE_SIZE]).unwrap();
    wait_until("it is back", || volume.stats(0).spilled_bytes == 0);
    assert!(read(&volume, second + PAGE, PAGE_SIZE) == [3; PAGE_SIZE]);
    drop(volume);

    let world = World::lending(1, 1, 1, 3 * SEGMENT_PAGES).spilling(None);
    let full = std::fs::OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    let spill = Spill::from_fd(full.into(), world.config.spill.as_ref().unwrap());
    let state = State::create(world.config.pages).unwrap().with_spill(Some(spill));
    let volume = Volume::open(world.config.clone(), world.known.clone(), state).unwrap();
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    let full = volume.write(second, &[1; PAGE_SIZE]).unwrap_err();
    assert!(matches!(&full, BlockError::Spill(error) if error.is_full()), "{full}");
    assert!(full.to_string().contains("spill"));
    assert_eq!(volume.read(second, &mut [1; 512]).unwrap(), Contents::Hole);
    assert!(read(&volume, 0, PAGE_SIZE) == [1; PAGE_SIZE]);
    assert_eq!(volume.stats(0).unkept_bytes, 0);
}

/// A volume that serves a snapshot, as another process does.
fn served(world: &World, config: VolumeConfig, snapshot: crate::Snapshot) -> Arc<Volume> {
    let state = State::from_fd(snapshot.state().unwrap()).unwrap();
    let volume = Volume::open(config, world.known.clone(), state).unwrap();
    snapshot.taken();
    volume
}

fn config_of_snapshot(world: &World) -> VolumeConfig {
    VolumeConfig {
        name: "copy".into(),
        space: random_u64(),
        spill: None,
        limit_bytes: None,
        write_buffer_bytes: None,
        ..world.config.clone()
    }
}

#[test]
fn a_snapshot_is_of_one_moment_while_clients_write() {
    const USED: u64 = 3000;
    for (buffer, spill, encrypt) in [
        (None, false, false),
        (Some(256 << 10), false, true),
        (None, true, false),
        (None, true, true),
    ] {
        let mut world = World::lending(8, 2, 2, SEGMENT_PAGES + 100).encrypting(encrypt);
        if spill {
            world = world.spilling(Some(1));
        }
        if let Some(bytes) = buffer {
            world = world.buffering(bytes);
        }
        let volume = world.volume();
        // One write follows the other, in both segments. So at any moment the pages up to one of
        // them have a turn's number, and later pages that of the turn before.
        let place = |at: u64| (SEGMENT_PAGES + 100 - USED + at) * PAGE;
        let write = |at: u64, turn: u8| volume.write(place(at), &[turn; PAGE_SIZE]).unwrap();
        (0..USED).for_each(|at| write(at, 1));
        let is_done = AtomicBool::new(false);
        let (config, snapshot) = thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 2..250u8 {
                    for at in 0..USED {
                        if is_done.load(Acquire) {
                            return;
                        }
                        // Pages that are dropped, too, are so after that moment.
                        match at % 16 {
                            0 => volume.trim(place(at), PAGE).unwrap(),
                            _ => write(at, turn),
                        }
                    }
                }
            });
            let config = config_of_snapshot(&world);
            let snapshot = volume.snapshot(config.clone(), world.known.clone());
            is_done.store(true, Release);
            (config, snapshot.unwrap())
        });
        let copy = served(&world, config, snapshot);
        let turns: Vec<u8> = (0..USED)
            .filter(|at| at % 16 != 0)
            .map(|at| {
                let found = read(&copy, place(at), PAGE_SIZE);
                assert!(found.iter().all(|byte| *byte == found[0]), "half a page");
                found[0]
            })
            .collect();
        let (first, last) = (turns[0], turns[turns.len() - 1]);
        assert!(first == last || first == last + 1, "{first} and {last}");
        assert!(turns.is_sorted_by(|one, next| one >= next), "of several moments");
        assert!(last >= 1, "something is missing");
        // Changes of the volume do not reach the snapshot.
        volume.trim(0, volume.size_bytes()).unwrap();
        volume.release().unwrap();
        assert_eq!(read(&copy, place(1), 1)[0], first);
        copy.release().unwrap();
        wait_until("all is free", || world.donors.iter().all(Lent::is_all_free));
    }
}

#[test]
fn a_snapshot_that_has_no_room_fails_and_nothing_else_does() {
    let world = World::lending(2, 1, 1, 2 * SEGMENT_PAGES);
    let volume = world.volume();
    let second = SEGMENT_PAGES * PAGE;
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    volume.write(second, &[2; PAGE_SIZE]).unwrap();
    let failed = volume.snapshot(config_of_snapshot(&world), world.known.clone());
    let failed = failed.err().expect("there is no room");
    assert!(matches!(failed, crate::SnapshotError::Copy(BlockError::NoRoom(_))), "{failed}");
    volume.write(0, &[3; PAGE_SIZE]).unwrap();
    assert!(read(&volume, 0, PAGE_SIZE) == [3; PAGE_SIZE]);
    volume.trim(second, second).unwrap();
    let config = config_of_snapshot(&world);
    let snapshot = volume.snapshot(config.clone(), world.known.clone()).unwrap();
    let copy = served(&world, config, snapshot);
    assert!(read(&copy, 0, PAGE_SIZE) == [3; PAGE_SIZE]);
    assert_eq!(read(&copy, second, 1), [0]);
    // One that nobody takes gives its memory back.
    copy.release().unwrap();
    drop(volume.snapshot(config_of_snapshot(&world), world.known.clone()).unwrap());
    volume.release().unwrap();
    wait_until("all is free", || world.donors[0].is_all_free());
}

/// Whether anything is answered that donors have not.
pub(crate) fn is_anything_named(volume: &Volume) -> bool {
    (0..SLOTS).any(|slot| volume.state.named(slot).is_some())
}

#[test]
fn a_flush_is_answered_when_donors_have_all_that_was_buffered() {
    let mut world = World::new(1, 1, 2 * SEGMENT_PAGES).buffering(1 << 20);
    world.config.donor_patience = Duration::from_secs(5);
    let volume = world.volume();
    // The donor is there for the first page, so that there is a segment, and then it is away.
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    volume.flush().unwrap();
    // A slot is free a moment after its page is where it is to be.
    wait_until("nothing is named", || !is_anything_named(&volume));
    let address = world.donors[0].stop();
    let of_page = |page: u64| [vec![page as u8; 7], vec![0xaa], vec![page as u8; 4088]].concat();
    // Each page once: a page that is being written out is locked until its donor has answered.
    for page in 0..100 {
        volume.write(page * PAGE, &of_page(page)).unwrap();
    }
    assert_eq!(volume.stats(0).buffered_bytes, 100 * PAGE);
    let flushed = volume.flush().unwrap_err();
    assert!(matches!(flushed, BlockError::Unflushed), "{flushed}");
    let kept = |volume: &Volume| {
        (0..100).all(|page| read(volume, page * PAGE, PAGE_SIZE) == of_page(page))
    };
    world.donors[0].serve_again(address);
    wait_until("it is written out", || volume.flush().is_ok());
    assert_eq!(volume.stats(0).buffered_bytes, 0);
    wait_until("nothing is named", || !is_anything_named(&volume));
    assert!(kept(&volume));
}

#[test]
fn what_is_written_through_is_where_it_is_to_be_kept() {
    let world = World::new(1, 1, SEGMENT_PAGES).buffering(1 << 20).spilling(Some(0));
    let is_flushed = |volume: &Volume| !volume.state.spill.as_ref().unwrap().is_dirty();
    let through = Caching::WriteThrough;
    let volume = world.volume();
    volume.write_as(through, 0, &[1; PAGE_SIZE]).unwrap();
    assert!(is_flushed(&volume) && volume.stats(0).spilled_bytes == PAGE);
    volume.write_zeroes_as(through, 7, PAGE, false).unwrap();
    assert!(is_flushed(&volume) && !is_anything_named(&volume));
    volume.write(0, &[2; PAGE_SIZE]).unwrap();
    wait_until("it is written out", || !is_flushed(&volume));
    volume.release().unwrap();

    let world = World::new(1, 1, SEGMENT_PAGES).buffering(1 << 20);
    let volume = world.volume();
    volume.write(0, &[1; 3 * PAGE_SIZE]).unwrap();
    // Contents that are still in the buffer are older.
    volume.write_as(through, 7, &[2; PAGE_SIZE]).unwrap();
    volume.flush().unwrap();
    let expected = [vec![1; 7], vec![2; PAGE_SIZE], vec![1; 2 * PAGE_SIZE - 7]].concat();
    assert!(read(&volume, 0, 3 * PAGE_SIZE) == expected);
}

#[test]
fn a_full_pool_fails_flushes_and_writes_past_the_buffer() {
    let world = World::full().buffering(64 << 10);
    let volume = world.volume();
    let second = World::FIRST_WITHOUT_ROOM;
    volume.write(0, &[1; PAGE_SIZE]).unwrap();
    volume.write(second, &[2; PAGE_SIZE]).unwrap();
    assert!(volume.flush().is_err());
    assert!(read(&volume, second, PAGE_SIZE) == [2; PAGE_SIZE], "it is kept");
    let refused = volume.write(second + PAGE, &[3; PAGE_SIZE]);
    assert!(matches!(refused, Err(BlockError::NoRoom(_))), "{refused:?}");
    volume.trim(0, second).unwrap();
    wait_until("it is written out", || volume.flush().is_ok());
    assert!(read(&volume, second, PAGE_SIZE) == [2; PAGE_SIZE]);
    volume.write(second + PAGE, &[3; PAGE_SIZE]).unwrap();
}

#[test]
fn many_write_to_the_same_pages_and_flush() {
    let world = World::new(2, 2, SEGMENT_PAGES).buffering(64 << 10);
    let volume = world.volume();
    thread::scope(|scope| {
        for thread in 0..6u64 {
            let volume = &volume;
            scope.spawn(move || {
                for turn in 0..300u64 {
                    let fill = [(thread * 41 + turn) as u8; 512];
                    let at = turn % 40 * PAGE + thread * 512;
                    volume.write(at, &fill).unwrap();
                    let mut found = [0; 512];
                    volume.read(at, &mut found).unwrap();
                    assert_eq!(found, fill);
                    match turn % 50 {
                        7 => volume.flush().unwrap(),
                        // Beside those of the others, and longer than the buffer.
                        9 => volume.write((50 + thread * 20) * PAGE, &[1; 20 * PAGE_SIZE]).unwrap(),
                        _ => {}
                    }
                }
            });
        }
    });
    volume.flush().unwrap();
    wait_until("nothing is named", || !is_anything_named(&volume));
}

#[test]
fn holes_take_no_memory_and_give_it_back() {
    let world = World::new(1, 1, 2 * SEGMENT_PAGES);
    let volume = world.volume();
    volume.write(0, &[0; 1 << 20]).unwrap();
    assert!(world.donors[0].is_all_free());
    assert_eq!(volume.read(5, &mut [1; 5000]).unwrap(), Contents::Hole);
    volume.write_zeroes(0, 1 << 20, true).unwrap();
    assert!(!world.donors[0].is_all_free());
    volume.write(0, &[1; 1 << 20]).unwrap();
    volume.trim(1, (1 << 20) - 2).unwrap();
    assert_eq!(volume.stats(0).data_bytes, 2 * PAGE, "parts of pages stay");
    volume.write_zeroes(0, 1 << 20, false).unwrap();
    assert_eq!(volume.stats(0).data_bytes, 0);
    wait_until("the segment is free", || world.donors[0].is_all_free());
    let beyond = volume.write(2 * SEGMENT_PAGES * PAGE - 1, &[0; 2]);
    assert!(matches!(beyond, Err(BlockError::Beyond { .. })));
}

/// All that is under way, to its end.
fn ends(flow: &mut Flow<u64>) -> Vec<Ended<u64>> {
    let mut ends = Vec::new();
    flow.send();
    while !flow.is_idle() {
        flow.progress(Some(patience()), &mut |ended| ends.push(ended));
    }
    ends
}

#[test]
fn what_is_under_way_together_keeps_others_out_and_ends_each_on_its_own() {
    let world = World::new(2, 2, SEGMENT_PAGES + 20);
    let volume = world.volume();
    let at = |page: u64| (page % 2 * SEGMENT_PAGES + page / 2) * PAGE;
    for page in 0..40 {
        volume.write(at(page), &[page as u8; PAGE_SIZE]).unwrap();
    }
    let mut flow = Flow::new(Arc::clone(&volume));
    for page in 0..20 {
        let begun = match page % 4 {
            0 | 1 => flow.write(page, at(page), &[100 + page as u8; PAGE_SIZE]),
            _ => flow.read(page, at(page), PAGE_SIZE, vec![0; PAGE_SIZE]),
        };
        assert!(matches!(begun, Begun::UnderWay), "{page}");
    }
    assert_eq!(flow.len(), 20);
    // Not begun: parts of pages, pages of two segments, and pages that another request has.
    assert!(matches!(flow.write(20, at(30) + 1, &[0; PAGE_SIZE]), Begun::Not(20)));
    let over = SEGMENT_PAGES * PAGE - PAGE;
    assert!(matches!(flow.read(20, over, 2 * PAGE_SIZE, vec![0; 2 * PAGE_SIZE]), Begun::Not(20)));
    assert!(matches!(flow.read(20, at(0), PAGE_SIZE, vec![0; PAGE_SIZE]), Begun::Not(20)));
    assert!(matches!(flow.write(20, at(2), &[0; PAGE_SIZE]), Begun::Not(20)));
    // A hole is known to be one.
    let hole = flow.read(20, 100 * PAGE, 5, vec![1; 7]);
    let is_hole = |data: &[u8]| data == [0, 0, 0, 0, 0, 1, 1];
    assert!(matches!(hole, Begun::Ended(Ended::Read(20, data, Contents::Hole)) if is_hole(&data)));

    let mut seen = [false; 20];
    for ended in ends(&mut flow) {
        let page = match ended {
            Ended::Written(page) if page % 4 < 2 => page,
            Ended::Read(page, data, Contents::Data) if page % 4 >= 2 => {
                assert!(data == [page as u8; PAGE_SIZE], "{page}");
                page
            }
            _ => panic!("a request failed"),
        };
        assert!(!std::mem::replace(&mut seen[page as usize], true), "{page} twice");
    }
    assert_eq!((seen, flow.len()), ([true; 20], 0));
    for page in 0..20 {
        let expected = page as u8 + if page % 4 < 2 { 100 } else { 0 };
        assert!(read(&volume, at(page), PAGE_SIZE) == [expected; PAGE_SIZE], "{page}");
    }
    assert!(!is_anything_named(&volume));
    let stats = volume.stats(0);
    assert_eq!((stats.reads, stats.writes, stats.errors), (10 + 1 + 20, 40 + 10, 0));
}

#[test]
fn writes_that_fail_together_are_written_again_or_settled_later() {
    for comes_back in [true, false] {
        let mut world = World::new(1, 1, 100);
        world.config.donor_patience = Duration::from_secs(5);
        let volume = world.volume();
        volume.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
        let mut flow = Flow::new(Arc::clone(&volume));
        for page in 0..3 {
            let begun = flow.write(page, page * PAGE, &[2; PAGE_SIZE]);
            assert!(matches!(begun, Begun::UnderWay));
        }
        let address = world.donors[0].stop();
        let mut ended = ends(&mut flow);
        let Some(Ended::Unwritten(unfinished)) = ended.pop() else { panic!("they have failed") };
        assert!(ended.is_empty(), "all of them together");
        if comes_back {
            world.donors[0].serve_again(address);
        }
        let finished = unfinished.finish(&volume).into_iter();
        let mut told: Vec<_> = finished.map(|(page, result)| (page, result.is_ok())).collect();
        told.sort_unstable();
        assert_eq!(told, [0, 1, 2].map(|page| (page, comes_back)));
        if !comes_back {
            // Nobody has the pages until it is known what became of them.
            assert!(volume.read(PAGE, &mut [0; PAGE_SIZE]).is_err());
            world.donors[0].serve_again(address);
            wait_until("it is settled", || volume.stats(0).unsettled == 0);
            wait_until("it is reached", || volume.read(0, &mut [0; 512]).is_ok());
        }
        assert!(read(&volume, 0, 3 * PAGE_SIZE) == [2; 3 * PAGE_SIZE]);
        assert!(read(&volume, 3 * PAGE, PAGE_SIZE) == [1; PAGE_SIZE]);
        assert!(!is_anything_named(&volume));
        // The next ones find a lane.
        volume.write(0, &[3; PAGE_SIZE]).unwrap();
        assert!(matches!(flow.write(7, PAGE, &[4; PAGE_SIZE]), Begun::UnderWay));
        assert!(matches!(&ends(&mut flow)[..], [Ended::Written(7)]));
    }
}

#[test]
fn a_read_that_comes_wrong_is_for_a_thread_of_its_own() {
    let world = World::new(1, 1, 100);
    let volume = world.volume();
    volume.write(0, &[1; 2 * PAGE_SIZE]).unwrap();
    let mut is_first = true;
    world.each_page_of(0, |_, page| page[9] ^= u8::from(std::mem::take(&mut is_first)));
    let mut flow = Flow::new(Arc::clone(&volume));
    for page in 0..2 {
        let begun = flow.read(page, page * PAGE, PAGE_SIZE, vec![0; PAGE_SIZE]);
        assert!(matches!(begun, Begun::UnderWay));
    }
    let ended = ends(&mut flow);
    let is_unread = |ended: &Ended<u64>| matches!(ended, Ended::Unread(0));
    let is_read = |ended: &Ended<u64>| matches!(ended, Ended::Read(1, _, Contents::Data));
    assert!(ended.len() == 2 && ended.iter().any(is_unread) && ended.iter().any(is_read));
    assert!(volume.read(0, &mut [0; 1]).is_err());
}

#[test]
fn it_goes_to_another_node_and_nothing_of_the_first_is_taken_any_more() {
    let world = World::new(2, 2, 2 * SEGMENT_PAGES);
    let first = world.volume();
    let far = SEGMENT_PAGES * PAGE + 9;
    first.write(5, b"first").unwrap();
    first.write(far, b"far").unwrap();
    let offer = || Offer { to: "b".into(), address: (Ipv4Addr::LOCALHOST, 0).into() };
    let client = first.attach(Client::Unknown, Role::Writer).unwrap();
    let refused = Offering::begin(&first, offer()).err().unwrap();
    assert!(refused.contains("is attached to it"), "{refused}");
    drop(client);

    let offering = Offering::begin(&first, offer()).unwrap();
    let at = offering.offer().address;
    for (volume, node, why) in [("disk", "c", "detached for node `b`"), ("other", "b", "`disk`")] {
        let refused = fetch(volume, ("a", at), node, None).err().unwrap().to_string();
        assert!(refused.contains(why), "{refused}");
    }
    // It is the first node's as long as it was not given.
    assert!(!first.is_given());
    offering.withdraw().unwrap();
    first.write(5, b"again").unwrap();

    let offering = Offering::begin(&first, offer()).unwrap();
    let fetch = || fetch("disk", ("a", offering.offer().address), "b", None).unwrap();
    let open = |fetched: &Fetched| {
        let state = State::from_fd(fetched.tables().unwrap()).unwrap();
        Volume::open(fetched.config.clone(), world.known.clone(), state)
    };
    // The other node is killed before it has begun, and asks again.
    drop(fetch());
    assert!(offering.withdraw().is_err(), "it may be the other one's");
    let fetched = fetch();
    let second = open(&fetched).unwrap();
    fetched.is_served();
    assert_eq!((read(&second, 5, 5), read(&second, far, 3)), (b"again".to_vec(), b"far".to_vec()));
    second.write(5, b"other").unwrap();
    for at in [5, far] {
        assert!(matches!(first.write(at, b"stale"), Err(BlockError::Over)));
    }
    wait_until("the first node sees that it is gone", || offering.is_taken());
    let tables = first.state.as_fd().try_clone_to_owned().unwrap();
    let stale =
        Volume::open(world.config.clone(), world.known.clone(), State::from_fd(tables).unwrap());
    let is_fenced = matches!(stale.err().unwrap(), VolumeError::Space(SpaceError::Fenced { .. }));
    assert!(is_fenced, "a process that is started again does not take it back");
    assert!(first.release().is_err(), "nor does the first one give anything up");
    assert_eq!((read(&second, 5, 5), read(&second, far, 3)), (b"other".to_vec(), b"far".to_vec()));
    second.release().unwrap();
    wait_until("all is given back", || world.donors.iter().all(Lent::is_all_free));
}
