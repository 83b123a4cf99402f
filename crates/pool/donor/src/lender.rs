//! A donor without its sockets: memory, table, ledger and gates, and what requests do to them.
//!
//! Control requests go through the table, under its lock; page requests through the space's
//! [`gate`](crate::pages::gate). The lock is never held while memory is given back or a socket is
//! waited for.

use crate::extents::ledger::Ledger;
use crate::extents::owner::NodeDigest;
use crate::extents::standing::Standing;
use crate::extents::table::{Allocated, LentExtent, SpaceUse, Table};
use crate::metrics::Metrics;
use crate::pages::bits::runs;
use crate::pages::gate::{Extent, Gate, Open, View};
use crate::pages::sums::PageSums;
use crate::parking::keeper::{Candidate, Survey};
use crate::parking::park::{Park, Parking};
use crate::snapshot::{Snapshot, SpaceSnapshot, ZoneSnapshot};
use hecaton_memory::arena::Arena;
use hecaton_memory::memfd::Backing;
use hecaton_memory::{
    Epoch, ExtentId, Generation, PAGE_SIZE, PageSignature, PageSum, Size, SpaceId, ZERO_PAGE_SUM,
    is_zero, page_signature, page_sum, pages_to_bytes,
};
use hecaton_policy::parking::Seen;
use hecaton_transport::protocol::{HeldExtent, Hello, Load, MAX_HELD, PageState, Refusal};
use hecaton_transport::server::Caller;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLockReadGuard};
use std::time::Instant;
use tracing::{info, warn};

/// Pages that a discard punches before it lets others in: about 0.4 ms.
const DISCARD_PAGES: u64 = 512;

/// Pages that a verification reads before it lets writes in: about 10 µs.
const VERIFY_PAGES: u32 = 16;

pub(crate) struct Lender {
    name: String,
    boot: u64,
    arena: Arena,
    sums: PageSums,
    park: Option<Park>,
    books: Mutex<Books>,
    /// Lendable pages of the table, for answers that do not lock it.
    free_pages: AtomicU64,
    in_service: AtomicU32,
    /// Nothing more is lent, and borrowers are told to take away what they have here.
    draining: AtomicBool,
    pub(crate) metrics: Metrics,
    born: Instant,
}

/// State that changes together, under one lock.
struct Books {
    table: Table,
    ledger: Ledger,
    gates: HashMap<SpaceId, Arc<Gate>>,
    limits: Limits,
}

/// Limits on the lending, besides the size of the arena.
#[derive(Default)]
struct Limits {
    /// From [`Lender::set_limit`].
    told: Option<Size>,
    /// From [`Lender::set_host_limit`].
    host: Option<Size>,
}

/// An extent that someone uses: its pages stay where they are until this is dropped.
pub(crate) struct Pinned<'a> {
    lender: &'a Lender,
    view: Option<Arc<View>>,
}

/// Result of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    /// The extent counts as parked: its pages are in memory again that was to be given back.
    pub(crate) to_parked: bool,
}

/// A borrower, as its connection introduced it.
#[derive(Clone)]
pub(crate) struct Borrower {
    pub(crate) space: SpaceId,
    pub(crate) epoch: Epoch,
    /// The node that it has shown to be; none without certificates.
    node: Option<NodeDigest>,
    /// Version of the protocol on its connection.
    version: u16,
    /// The lease that it wants.
    lease_ms: u64,
    gate: Arc<Gate>,
}

impl Borrower {
    /// Passes the space's gate.
    fn enter(&self, now_ms: u64) -> Result<RwLockReadGuard<'_, Open>, Refusal> {
        self.gate.enter((self.node, self.epoch), now_ms)
    }

    /// The same, to read pages.
    fn enter_to_read(&self, now_ms: u64) -> Result<RwLockReadGuard<'_, Open>, Refusal> {
        self.gate.enter_to_read((self.node, self.epoch), now_ms)
    }
}

/// Where a page is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// Nowhere: it was never written.
    Unwritten,
    /// In the arena.
    Memory(PageSum),
    /// In the file.
    Parked(PageSum),
}

/// A page of a read: its number among the donor's pages, and where it is.
pub(crate) type PageSource = (u64, Place);

impl Lender {
    pub(crate) fn new(
        name: String,
        arena: Arena,
        mut table: Table,
        ledger: Ledger,
        park: Option<Park>,
    ) -> Lender {
        let sums = PageSums::new(ledger.words().clone(), ledger.layout());
        let gate = |SpaceUse { record, heard_ms, .. }: SpaceUse| {
            (record.space, Arc::new(Gate::new(record.fence, heard_ms, record.owner)))
        };
        let gates: HashMap<_, _> = table.spaces().map(gate).collect();
        let lent: Vec<LentExtent> = table.extents().copied().collect();
        for lent in lent {
            let at = ledger.generation_of(lent.extent);
            let standing = Standing::restored(ledger.words().clone(), at);
            let parking = Parking::default();
            if let Some(park) = &park
                && park.parked().count(lent.pages()) > 0
            {
                // A discard clears the other bit first.
                lent.pages().filter(|page| sums.get(*page).is_none()).for_each(|page| {
                    park.parked().clear(page..page + 1);
                });
                parking.is_parked.store(true, Ordering::Relaxed);
                table.set_parked(&lent, true);
            }
            let extent = View::first(lent, standing, parking);
            gates[&lent.space].change().extents.insert(lent.extent, extent);
        }
        Lender {
            name,
            boot: ledger.boot(),
            sums,
            park,
            free_pages: AtomicU64::new(table.lendable_pages()),
            arena,
            books: Mutex::new(Books { table, ledger, gates, limits: Limits::default() }),
            in_service: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            metrics: Metrics::default(),
            born: Instant::now(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn boot(&self) -> u64 {
        self.boot
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn parks_in(&self) -> Option<&Park> {
        self.park.as_ref()
    }

    /// Milliseconds since this process took up the lending.
    pub(crate) fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    pub(crate) fn load(&self, borrower: &Borrower) -> Load {
        let draining = self.is_draining();
        Load {
            free_pages: if draining { 0 } else { self.free_pages.load(Ordering::Relaxed) },
            in_service: self.in_service.load(Ordering::Relaxed),
            draining,
            recalled: borrower.gate.recalled.load(Ordering::Relaxed),
        }
    }

    /// Lends no more than it is told from now on, and wants back what is above that.
    pub(crate) fn set_limit(&self, told: Option<Size>) {
        self.change_limits(|limits| limits.told = told);
    }

    /// The same, because of what the host has left.
    pub(crate) fn set_host_limit(&self, host: Size) {
        self.change_limits(|limits| limits.host = Some(host));
    }

    fn change_limits(&self, change: impl FnOnce(&mut Limits)) {
        let mut books = self.books();
        change(&mut books.limits);
        let Limits { told, host } = books.limits;
        let pages = |limit: Size| limit.0 / PAGE_SIZE as u64;
        let limits = [told, host].into_iter().flatten().map(pages);
        let limit_pages = limits.fold(self.arena.pages(), u64::min);
        let before = books.table.limit_pages();
        if before != limit_pages {
            books.table.set_limit(limit_pages, self.now_ms());
            self.publish(&books);
            let (from, to) = (Size(pages_to_bytes(before)), Size(pages_to_bytes(limit_pages)));
            let recalled = Size(pages_to_bytes(books.table.excess_pages()));
            info!(donor = self.name, %from, %to, %recalled, "the limit of what is lent changes");
        }
    }

    /// Bytes of memory that are lent, or have gone back and are not the host's again yet.
    pub(crate) fn in_use_bytes(&self) -> u64 {
        pages_to_bytes(self.memory_pages(&self.books()))
    }

    fn memory_pages(&self, books: &Books) -> u64 {
        let strays = self.park.as_ref().map_or(0, Park::stray_pages);
        books.table.memory_pages() + strays.min(books.table.parked_pages())
    }

    /// Looks again who is to give back what is above the limit, now that time has passed.
    pub(crate) fn review_recalls(&self) {
        let mut books = self.books();
        books.table.review(self.now_ms());
        self.publish(&books);
    }

    /// Begins to drain, or goes on lending.
    pub(crate) fn set_draining(&self, draining: bool) {
        if self.draining.swap(draining, Ordering::Relaxed) != draining {
            info!(donor = self.name, draining, "what is lent is wanted back, or no longer");
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn begin_service(&self) {
        self.in_service.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_service(&self) {
        self.in_service.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn hello(&self, hello: &Hello, caller: Caller<'_>) -> Result<Borrower, Refusal> {
        let &Hello { space, epoch, .. } = hello;
        let lease_ms = u64::try_from(hello.lease.as_millis()).unwrap_or(u64::MAX);
        let node = caller.node.map(NodeDigest::of);
        let now_ms = self.now_ms();
        let mut books = self.books();
        let Books { table, ledger, gates, .. } = &mut *books;
        let mut is_visitor = false;
        if let Some(gate) = gates.get(&space) {
            let open = gate.look();
            open.ownership.check_reader(node)?;
            is_visitor = open.ownership.check(node).is_err();
        }
        if is_visitor {
            table.visit(space, epoch)?;
        } else {
            table.hello(space, epoch, lease_ms, &hello.consumer, now_ms)?;
            if let Some(record) = table.space(space) {
                ledger.put_space(&record);
            }
        }
        let fresh = || Arc::new(Gate::new(Epoch(0), now_ms, None));
        let gate = gates.entry(space).or_insert_with(fresh).clone();
        Ok(Borrower { space, epoch, node, version: caller.version, lease_ms, gate })
    }

    /// Lets a node's donors read what the space has here.
    pub(crate) fn admit(&self, borrower: &Borrower, node: &str) -> Result<(), Refusal> {
        // Without this lock no gate changes.
        let _books = self.books();
        drop(borrower.enter(self.now_ms())?);
        borrower.gate.change().ownership.admit(NodeDigest::of(node))
    }

    /// Lets a node take the space over, once.
    pub(crate) fn bequeath(&self, borrower: &Borrower, node: &str) -> Result<(), Refusal> {
        // Without this lock no gate changes.
        let _books = self.books();
        drop(borrower.enter(self.now_ms())?);
        borrower.gate.change().ownership.bequeath(NodeDigest::of(node));
        Ok(())
    }

    pub(crate) fn bye(&self, borrower: &Borrower) {
        self.books().table.bye(borrower.space);
    }

    /// Finds the pages of a read. They stay where they are while the pin lives; what they hold may
    /// change, and then their sums tell.
    pub(crate) fn read(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        pages: &[u32],
        now_ms: u64,
        mut sink: impl FnMut(PageSource),
    ) -> Result<Pinned<'_>, Refusal> {
        let view = {
            let open = borrower.enter_to_read(now_ms)?;
            open.extent(extent)?.clone()
        };
        let pinned = Pinned { lender: self, view: Some(view) };
        let view = pinned.view();
        if self.park.is_some() {
            view.parking.touch(now_ms);
        }
        for &page in pages {
            let page = view.lent.page(page)?;
            sink((page, self.place_of(page)));
        }
        Ok(pinned)
    }

    fn place_of(&self, page: u64) -> Place {
        match self.sums.get(page) {
            None => Place::Unwritten,
            Some(sum) if self.is_parked(page) => Place::Parked(sum),
            Some(sum) => Place::Memory(sum),
        }
    }

    fn is_parked(&self, page: u64) -> bool {
        self.park.as_ref().is_some_and(|park| park.parked().get(page))
    }

    /// Whether the page was written and is in memory.
    pub(crate) fn is_in_memory(&self, page: u64) -> bool {
        matches!(self.place_of(page), Place::Memory(_))
    }

    /// Verifies pages and stores them, all or none.
    pub(crate) fn write(
        &self,
        borrower: &Borrower,
        (extent, generation): (ExtentId, Generation),
        pages: &[u32],
        sums: &[PageSum],
        data: &[u8],
        now_ms: u64,
    ) -> Result<Written, Refusal> {
        let (data, rest) = data.as_chunks::<PAGE_SIZE>();
        assert!(rest.is_empty() && data.len() == pages.len() && sums.len() == pages.len());
        for (at, (page, &sum)) in (0..).zip(data.iter().zip(sums)) {
            if page_sum(page) != sum {
                return Err(Refusal::Corrupt(at));
            }
        }
        let open = borrower.enter(now_ms)?;
        let extent = open.extent(extent)?;
        for &page in pages {
            extent.lent.page(page)?;
        }
        let _shared = extent.contents.read().expect("no thread panics in an extent");
        extent.standing.written(generation);
        for ((&page, &sum), data) in pages.iter().zip(sums).zip(data) {
            self.store(extent, page, data, sum)?;
        }
        if self.park.is_some() {
            extent.parking.touch(now_ms);
        }
        Ok(Written { to_parked: extent.parking.is_parked.load(Ordering::Relaxed) })
    }

    /// Stores a page of an extent in memory, wherever it was before. The caller has the extent's
    /// contents, shared or alone.
    fn store(
        &self,
        extent: &Extent,
        page: u32,
        data: &[u8; PAGE_SIZE],
        sum: PageSum,
    ) -> Result<(), Refusal> {
        let at = extent.lent.page(page)?;
        match self.sums.get(at) {
            Some(_) => self.arena.write_page(at, data),
            None => self.arena.commit_pages(at, std::slice::from_ref(data)),
        }
        self.stored(extent, page, at, sum);
        Ok(())
    }

    /// The arena has new contents of a page.
    fn stored(&self, extent: &Extent, page: u32, at: u64, sum: PageSum) {
        let Some(park) = &self.park else { return self.sums.store(at, sum) };
        let was_unwritten = self.sums.get(at).is_none();
        self.sums.store(at, sum);
        extent.parking.changed(u64::from(page)..u64::from(page) + 1);
        park.rewritten(&extent.parking, at, was_unwritten);
    }

    /// Stores what another extent of the segment holds in pages that follow one another, but for
    /// those that were written or discarded here. Pages of zeros stay unwritten.
    pub(crate) fn fill(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        first: u32,
        sums: &[PageSum],
        data: &[u8],
    ) -> Result<(), Refusal> {
        let open = borrower.enter(self.now_ms())?;
        let extent = open.extent(extent)?;
        let _alone = extent.contents.write().expect("no thread panics in an extent");
        if !extent.standing.can_be_filled() {
            return Err(Refusal::NotFilling);
        }
        let pages = data.as_chunks::<PAGE_SIZE>().0;
        let run = extent.lent.run(first, pages.len() as u32)?;
        let is_kept = |at: usize| {
            let is_newer = self.sums.get(run.start + at as u64).is_some()
                || extent.standing.was_discarded(first + at as u32);
            // A page that has gone bad and reads as zeros is not to look like one of zeros.
            is_newer || (sums[at] == ZERO_PAGE_SUM && is_zero(&pages[at]))
        };
        let mut next = 0;
        while next < pages.len() {
            let begin = next;
            while next < pages.len() && !is_kept(next) {
                next += 1;
            }
            self.arena.commit_pages(run.start + begin as u64, &pages[begin..next]);
            for (at, &sum) in (begin..next).zip(&sums[begin..next]) {
                self.stored(extent, first + at as u32, run.start + at as u64, sum);
            }
            // The one that is kept.
            next += 1;
        }
        Ok(())
    }

    /// The extent has all that its segment had in that generation.
    pub(crate) fn confirm(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        generation: Generation,
    ) -> Result<(), Refusal> {
        let open = borrower.enter(self.now_ms())?;
        open.extent(extent)?.standing.confirmed(generation);
        Ok(())
    }

    /// Recomputes the sums of a run of pages, and compares them with the stored sums.
    pub(crate) fn verify(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        (first, count): (u32, u32),
        states: &mut Vec<PageState>,
    ) -> Result<(), Refusal> {
        states.clear();
        let end = first.checked_add(count).ok_or(Refusal::OutOfBounds)?;
        let mut page = first;
        while page < end {
            let until = end.min(page + VERIFY_PAGES);
            let mut parked = Vec::new();
            let view = {
                let open = borrower.enter(self.now_ms())?;
                let view = open.extent(extent)?;
                let run = view.lent.run(page, end - page)?;
                // A page that is being written does not match its sum.
                let _alone = view.contents.write().expect("no thread panics in an extent");
                for at in run.take((until - page) as usize) {
                    states.push(self.state_in_memory(at).unwrap_or_else(|sum| {
                        parked.push((states.len(), at, sum));
                        PageState::Sound(sum)
                    }));
                }
                (!parked.is_empty()).then(|| view.clone())
            };
            if let Some(view) = view {
                self.verify_parked(&Pinned { lender: self, view: Some(view) }, &parked, states);
            }
            page = until;
        }
        Ok(())
    }

    /// Computes the signatures of a run of pages as they are. A page that the disk does not give is
    /// signed with the contents that a reader would get.
    pub(crate) fn sign(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        (first, count): (u32, u32),
        signatures: &mut Vec<PageSignature>,
    ) -> Result<(), Refusal> {
        signatures.clear();
        let end = first.checked_add(count).ok_or(Refusal::OutOfBounds)?;
        let mut data = [[0; PAGE_SIZE]];
        for page in first..end {
            let (view, at, sum) = {
                let open = borrower.enter(self.now_ms())?;
                let view = open.extent(extent)?;
                let at = view.lent.page(page)?;
                let _alone = view.contents.write().expect("no thread panics in an extent");
                match self.place_of(at) {
                    Place::Unwritten => {
                        signatures.push(PageSignature::default());
                        continue;
                    }
                    Place::Memory(_) => {
                        self.arena.read_page(at, &mut data[0]);
                        signatures.push(page_signature(&data[0]));
                        continue;
                    }
                    Place::Parked(sum) => (view.clone(), at, sum),
                }
            };
            let _pinned = Pinned { lender: self, view: Some(view) };
            if let Some(park) = &self.park {
                park.read(at, &[sum], &mut data);
            }
            signatures.push(page_signature(&data[0]));
        }
        Ok(())
    }

    /// Reads parked pages, under no lock that a request waits for. Corrects the states of those
    /// that do not match their sums.
    fn verify_parked(
        &self,
        pinned: &Pinned<'_>,
        parked: &[(usize, u64, PageSum)],
        states: &mut [PageState],
    ) {
        let Some(park) = &self.park else { return };
        for &(at, page, sum) in parked {
            let mut data = [[0; PAGE_SIZE]];
            park.read(page, &[sum], &mut data);
            if page_sum(&data[0]) == sum {
                continue;
            }
            // Unless it was brought to memory, or written, while it was being read.
            let _alone = pinned.view().contents.write().expect("no thread panics in an extent");
            states[at] = self.state_in_memory(page).unwrap_or_else(PageState::Damaged);
        }
    }

    /// Stores a page's contents again, if those here do not match the page's sum and these do.
    pub(crate) fn repair(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        page: u32,
        data: &[u8; PAGE_SIZE],
    ) -> Result<bool, Refusal> {
        let open = borrower.enter(self.now_ms())?;
        let extent = open.extent(extent)?;
        let at = extent.lent.page(page)?;
        let _alone = extent.contents.write().expect("no thread panics in an extent");
        let sum = page_sum(data);
        let is_right = match self.state_in_memory(at) {
            Ok(state) => state == PageState::Damaged(sum),
            // The file has nothing better, and reading it would make others wait for the disk.
            Err(parked) => parked == sum,
        };
        if is_right {
            self.store(extent, page, data, sum)?;
        }
        Ok(is_right)
    }

    /// The state of a page, or its sum if it is parked. The caller keeps writes from the page.
    fn state_in_memory(&self, page: u64) -> Result<PageState, PageSum> {
        let sum = match self.place_of(page) {
            Place::Unwritten => return Ok(PageState::Unwritten),
            Place::Parked(sum) => return Err(sum),
            Place::Memory(sum) => sum,
        };
        let mut data = [0; PAGE_SIZE];
        self.arena.read_page(page, &mut data);
        let is_sound = page_sum(&data) == sum;
        Ok(if is_sound { PageState::Sound(sum) } else { PageState::Damaged(sum) })
    }

    /// Forgets a run of pages and gives their memory back.
    pub(crate) fn discard(
        &self,
        borrower: &Borrower,
        (extent, generation): (ExtentId, Generation),
        first: u32,
        count: u32,
    ) -> Result<(), Refusal> {
        let mut rest = {
            let open = borrower.enter(self.now_ms())?;
            open.extent(extent)?.lent.run(first, count)?
        };
        while !rest.is_empty() {
            let border = (rest.start / DISCARD_PAGES + 1) * DISCARD_PAGES;
            let run = rest.start..rest.end.min(border);
            rest.start = run.end;
            // Asked again for each part: a fence or a free may have come in between.
            let open = borrower.enter(self.now_ms())?;
            let extent = open.extent(extent)?;
            let _alone = extent.contents.write().expect("no thread panics in an extent");
            let (from, pages) = (run.start - extent.lent.first_page, run.end - run.start);
            extent.standing.discarded(generation, from as u32, pages as u32);
            extent.parking.changed(from..from + pages);
            match self.arena.backing() {
                Backing::BasePages => self.empty(run),
                // A write to a huge page that was punched raises SIGBUS if the host has no other.
                Backing::HugePages => self.forget(run),
            }
        }
        Ok(())
    }

    pub(crate) fn allocate(
        &self,
        borrower: &Borrower,
        member: (u64, u8),
        order: u8,
        generation: Generation,
    ) -> Result<ExtentId, Refusal> {
        let Borrower { space, epoch, gate, .. } = borrower;
        let now_ms = self.now_ms();
        let mut books = self.books_for(borrower)?;
        let lent = match books.table.allocate(*space, *epoch, member, order, now_ms)? {
            Allocated::Held(lent) => return Ok(lent.extent),
            Allocated::Fresh(lent) => lent,
        };
        if self.is_draining() {
            books.table.free(*space, *epoch, lent.extent, now_ms)?;
            books.table.reclaimed(lent.extent);
            return Err(Refusal::Full);
        }
        if let Err(error) = self.arena.prepare(lent.pages()) {
            warn!(%error, order, "the host gives no huge pages for an extent");
            books.table.free(*space, *epoch, lent.extent, now_ms)?;
            books.table.reclaimed(lent.extent);
            return Err(Refusal::Full);
        }
        books.ledger.put_extent(&lent, generation);
        let at = books.ledger.generation_of(lent.extent);
        let pages = lent.pages().end - lent.first_page;
        let standing = Standing::fresh(books.ledger.words().clone(), at, pages);
        let fresh = View::first(lent, standing, Parking::default());
        gate.change().extents.insert(lent.extent, fresh);
        self.publish(&books);
        Ok(lent.extent)
    }

    pub(crate) fn free(&self, borrower: &Borrower, extent: ExtentId) -> Result<(), Refusal> {
        let mut books = self.books_for(borrower)?;
        books.table.free(borrower.space, borrower.epoch, extent, self.now_ms())?;
        books.ledger.remove_extent(extent);
        let freed = borrower.gate.change().extents.remove(&extent);
        self.publish(&books);
        drop(books);
        drop(Pinned { lender: self, view: freed });
        Ok(())
    }

    /// Takes all extents from the space. Their memory goes back when what is returned is dropped.
    pub(crate) fn free_all(&self, borrower: &Borrower) -> Result<Vec<Pinned<'_>>, Refusal> {
        let mut books = self.books_for(borrower)?;
        let freed = books.table.free_all(borrower.space, borrower.epoch, self.now_ms())?;
        freed.iter().for_each(|lent| books.ledger.remove_extent(lent.extent));
        let extents = std::mem::take(&mut borrower.gate.change().extents);
        self.publish(&books);
        Ok(self.pinned(extents))
    }

    pub(crate) fn list(
        &self,
        borrower: &Borrower,
        from: ExtentId,
        lines: &mut Vec<HeldExtent>,
    ) -> Result<(), Refusal> {
        let Borrower { space, epoch, .. } = *borrower;
        let mut books = self.books_for(borrower)?;
        let Books { table, ledger, .. } = &mut *books;
        let listed = table.list(space, epoch, from, MAX_HELD, self.now_ms())?;
        let listed: Vec<_> = listed.map(|lent| (lent, ledger.generation(lent.extent))).collect();
        drop(books);
        lines.clear();
        // Without the lock: a full list is a scan of megabytes. Nobody but this borrower, who waits
        // for the answer, and those that it has fenced could have written meanwhile.
        lines.extend(
            listed
                .iter()
                .map(|(lent, generation)| lent.line(self.sums.written(lent.pages()), *generation)),
        );
        Ok(())
    }

    /// When this returns, no request of an older epoch is in flight, and no further one is let in.
    /// The same holds for requests of other nodes, where the nodes are known.
    pub(crate) fn fence(&self, borrower: &Borrower) -> Result<(), Refusal> {
        let &Borrower { space, epoch, node, version, lease_ms, ref gate } = borrower;
        let mut books = self.books();
        let Books { table, ledger, .. } = &mut *books;
        let mut open = gate.change();
        open.ownership.check_successor(node, epoch, open.fence)?;
        table.fence(space, epoch, self.now_ms())?;
        if let Some(node) = node
            && open.ownership.fenced(node, version)
        {
            table.own(space, node, lease_ms);
        }
        if let Some(record) = table.space(space) {
            ledger.put_space(&record);
        }
        open.fence = epoch;
        Ok(())
    }

    pub(crate) fn renew(&self, borrower: &Borrower) -> Result<(), Refusal> {
        borrower.enter(self.now_ms()).map(drop)
    }

    /// Takes the extents of spaces that were silent for longer than their lease.
    pub(crate) fn expire_leases(&self) {
        let now_ms = self.now_ms();
        let due = {
            let mut books = self.books();
            let Books { table, gates, .. } = &mut *books;
            gates.iter().for_each(|(&space, gate)| table.heard(space, gate.heard_ms()));
            table.due(now_ms)
        };
        for space in due {
            let taken = self.expire(space, now_ms);
            if !taken.is_empty() {
                info!(%space, extents = taken.len(), "a lease has run out");
                self.metrics.expired(taken.len() as u64);
            }
        }
        let mut books = self.books();
        for space in books.table.forget(now_ms) {
            books.ledger.remove_space(space);
            books.gates.remove(&space);
        }
    }

    fn expire(&self, space: SpaceId, now_ms: u64) -> Vec<Pinned<'_>> {
        let mut books = self.books();
        let Books { table, ledger, gates, .. } = &mut *books;
        let Some(gate) = gates.get(&space) else { return Vec::new() };
        let mut open = gate.change();
        // A request may have passed since this space was found to be due. None can from here on.
        table.heard(space, gate.heard_ms());
        let expired = table.expire(space, now_ms);
        expired.iter().for_each(|lent| ledger.remove_extent(lent.extent));
        let extents = match expired.is_empty() {
            true => HashMap::new(),
            false => std::mem::take(&mut open.extents),
        };
        self.pinned(extents)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let now_ms = self.now_ms();
        let mut books = self.books();
        let Books { table, gates, .. } = &mut *books;
        gates.iter().for_each(|(&space, gate)| table.heard(space, gate.heard_ms()));
        let spaces: Vec<_> = table
            .spaces()
            .map(|space| SpaceSnapshot {
                space: space.record.space,
                consumer: space.record.consumer,
                fence: space.record.fence,
                extents: space.extents as u64,
                pages: space.pages,
                recalled: space.recalled,
                silent_ms: now_ms.saturating_sub(space.heard_ms),
                lease_ms: space.record.lease_ms,
            })
            .collect();
        let zones: Vec<_> = table
            .zones()
            .map(|(zone, free_pages)| ZoneSnapshot {
                node: zone.node,
                pages: zone.pages,
                free_pages,
            })
            .collect();
        let (free_pages, leaving_pages) = (table.free_pages(), table.leaving_pages());
        let (limit_pages, recalled_pages) = (table.limit_pages(), table.excess_pages());
        let lendable_pages = table.lendable_pages();
        let park = self.park.as_ref().map(|park| park.snapshot(table.parked_pages()));
        let told_limit_bytes = books.limits.told.map(|limit| limit.0);
        let host_limit_bytes = books.limits.host.map(|limit| limit.0);
        drop(books);
        let committed_bytes = self.arena.committed_bytes().unwrap_or_else(|error| {
            warn!(%error, "cannot tell how much memory is committed");
            0
        });
        Snapshot {
            name: self.name.clone(),
            boot: self.boot,
            uptime_ms: now_ms,
            pages: self.arena.pages(),
            free_pages,
            lent_pages: spaces.iter().map(|space| space.pages).sum(),
            leaving_pages,
            limit_pages,
            told_limit_bytes,
            host_limit_bytes,
            lendable_pages,
            recalled_pages,
            park,
            committed_bytes,
            in_service: self.in_service.load(Ordering::Relaxed),
            draining: self.is_draining(),
            zones,
            spaces,
            counters: self.metrics.total(),
        }
    }

    /// Empties a run: it reads as zeros, and its memory is the host's again.
    ///
    /// Failing to give memory back hurts nobody but the host, since nothing of it is ever read.
    fn empty(&self, run: Range<u64>) {
        self.forget(run.clone());
        self.give_back(run);
    }

    /// Gives memory back to the host.
    fn give_back(&self, run: Range<u64>) {
        if let Err(error) = self.arena.discard(run.clone()) {
            let bytes = pages_to_bytes(run.end - run.start);
            warn!(%error, bytes, "memory could not be given back to the host");
        }
    }

    /// Makes a run read as zeros.
    fn forget(&self, run: Range<u64>) {
        if let Err(error) = self.sums.forget(run.clone()) {
            warn!(%error, "the memory of checksums could not be given back to the host");
        }
        if let Some(park) = &self.park {
            park.forget(run);
        }
    }

    /// Empties pages that are not lent, and the memory of parked pages: a predecessor may have died
    /// before it did.
    pub(crate) fn empty_what_is_of_no_use(&self) {
        let mut lent: Vec<_> = self.books().table.extents().map(|lent| lent.pages()).collect();
        lent.sort_by_key(|pages| pages.start);
        let mut free_from = 0;
        for pages in lent {
            self.empty(free_from..pages.start);
            free_from = pages.end;
            self.empty_memory_of_parked(pages);
        }
        self.empty(free_from..self.arena.pages());
    }

    fn pinned(&self, extents: HashMap<ExtentId, Arc<View>>) -> Vec<Pinned<'_>> {
        extents.into_values().map(|view| Pinned { lender: self, view: Some(view) }).collect()
    }

    /// Input for the keeper's decisions; `None` if it can have nothing to do.
    pub(crate) fn survey(&self) -> Option<Survey> {
        let park = self.park.as_ref()?;
        let now_ms = self.now_ms();
        let books = self.books();
        let Books { table, gates, .. } = &*books;
        if table.excess_pages() == 0 && table.parked_pages() == 0 {
            return None;
        }
        let (mut candidates, mut stray_pages) = (Vec::new(), 0);
        for gate in gates.values() {
            for view in gate.look().extents.values() {
                let strays = match view.parking.is_parked.load(Ordering::Relaxed) {
                    true => self.pages_in_memory(&view.lent),
                    false => 0,
                };
                stray_pages += strays;
                candidates.extend(Candidate::of(view, strays));
            }
        }
        park.set_stray_pages(stray_pages);
        let seen = Seen {
            limit_pages: table.limit_pages(),
            memory_pages: self.memory_pages(&books),
            stalled_ms: table.stalled_ms(now_ms),
            patience_ms: park.patience().as_millis() as u64,
            file_room_pages: park.room_pages(table.parked_pages()),
        };
        Some(Survey { seen, candidates })
    }

    fn pages_in_memory(&self, lent: &LentExtent) -> u64 {
        let parked = self.park.as_ref().map_or(0, |park| park.parked().count(lent.pages()));
        u64::from(self.sums.written(lent.pages())).saturating_sub(parked)
    }

    /// An extent of a space, if it still is there.
    pub(crate) fn pin(&self, space: SpaceId, extent: ExtentId) -> Option<Pinned<'_>> {
        let books = self.books();
        let view = books.gates.get(&space)?.look().extents.get(&extent)?.clone();
        drop(books);
        Some(Pinned { lender: self, view: Some(view) })
    }

    /// Gives later requests to an extent another view of it; false if the extent was freed.
    pub(crate) fn renew_view(&self, before: &Pinned<'_>) -> bool {
        let view = before.view();
        let books = self.books();
        let Some(gate) = books.gates.get(&view.lent.space) else { return false };
        let mut open = gate.change();
        let Some(current) = open.extents.get_mut(&view.lent.extent) else { return false };
        let replaced =
            std::mem::replace(current, Arc::new(View { extent: Arc::clone(&view.extent) }));
        // The caller has the same one, so that this is never the last.
        drop(replaced);
        true
    }

    /// An extent's pages are in the file from now on, or in memory.
    pub(crate) fn set_parked(&self, lent: &LentExtent, is_parked: bool) {
        self.books().table.set_parked(lent, is_parked);
    }

    /// Gives back the memory of those pages that are parked. The caller keeps writes from them.
    pub(crate) fn empty_memory_of_parked(&self, pages: Range<u64>) {
        for run in runs(pages, |page| self.is_parked(page)) {
            self.give_back(run);
        }
    }

    /// Lets answers tell what the table says by now.
    fn publish(&self, books: &Books) {
        self.free_pages.store(books.table.lendable_pages(), Ordering::Relaxed);
        for (&space, gate) in &books.gates {
            let recalled = books.table.recalled(space).min(u64::from(u32::MAX)) as u32;
            gate.recalled.store(recalled, Ordering::Relaxed);
        }
    }

    /// Locks the books for a borrower with all rights to the space. Its owner cannot change then.
    fn books_for(&self, borrower: &Borrower) -> Result<MutexGuard<'_, Books>, Refusal> {
        let books = self.books();
        borrower.gate.look().ownership.check(borrower.node)?;
        Ok(books)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no thread panics with the table")
    }
}

impl Pinned<'_> {
    pub(crate) fn view(&self) -> &Arc<View> {
        self.view.as_ref().expect("it is taken by the drop alone")
    }

    /// Whether no other holder has this view; that is final once the gate has another view.
    pub(crate) fn is_alone(&mut self) -> bool {
        self.view.as_mut().is_some_and(|view| Arc::get_mut(view).is_some())
    }
}

impl Drop for Pinned<'_> {
    /// The last holder of a freed extent gives its memory back. Until the extent is freed, the gate
    /// holds it too, and this holder is not the last.
    ///
    /// Takes the table's lock, and so must not happen under it.
    fn drop(&mut self) {
        let Some(view) = self.view.take().and_then(Arc::into_inner) else { return };
        let Some(extent) = Arc::into_inner(view.extent) else { return };
        self.lender.empty(extent.lent.pages());
        let mut books = self.lender.books();
        books.table.reclaimed(extent.lent.extent);
        self.lender.publish(&books);
    }
}
