//! A donor without its sockets: memory, table, ledger and gates, and what requests do to them.
//!
//! Control requests go through the table, under its lock; page requests through the space's
//! [`gate`](crate::gate). The lock is never held while memory is given back or a socket is waited
//! for.

use crate::gate::{Extent, Gate};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::snapshot::{Snapshot, SpaceSnapshot, ZoneSnapshot};
use crate::standing::Standing;
use crate::sums::PageSums;
use crate::table::{Allocated, SpaceUse, Table};
use hecaton_memory::arena::Arena;
use hecaton_memory::memfd::Backing;
use hecaton_memory::{
    Epoch, ExtentId, Generation, PAGE_SIZE, PageSum, Size, SpaceId, ZERO_PAGE_SUM, is_zero,
    page_sum, pages_to_bytes,
};
use hecaton_transport::protocol::{HeldExtent, Load, MAX_HELD, PageState, Refusal};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
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
    books: Mutex<Books>,
    /// What the table says, for answers that do not ask it.
    free_pages: AtomicU64,
    in_service: AtomicU32,
    /// Nothing more is lent, and borrowers are told to take away what they have here.
    draining: AtomicBool,
    pub(crate) metrics: Metrics,
    born: Instant,
}

/// What changes together, under one lock.
struct Books {
    table: Table,
    ledger: Ledger,
    gates: HashMap<SpaceId, Arc<Gate>>,
    limits: Limits,
}

/// What bounds the lending, beside the memory that there is.
#[derive(Default)]
struct Limits {
    /// What it was told to lend at most.
    told: Option<Size>,
    /// What its host can do without.
    host: Option<Size>,
}

/// An extent that someone uses: its pages stay where they are until this is dropped.
pub(crate) struct Pinned<'a> {
    lender: &'a Lender,
    extent: Option<Arc<Extent>>,
}

/// Who asks.
#[derive(Clone)]
pub(crate) struct Borrower {
    pub(crate) space: SpaceId,
    pub(crate) epoch: Epoch,
    gate: Arc<Gate>,
}

/// A page of a read: where it is, or that it was never written.
pub(crate) type PageSource = Option<(*const u8, PageSum)>;

impl Lender {
    pub(crate) fn new(name: String, arena: Arena, table: Table, ledger: Ledger) -> Lender {
        let sums = PageSums::new(ledger.words().clone(), ledger.layout());
        let gate = |SpaceUse { record, heard_ms, .. }: SpaceUse| {
            (record.space, Arc::new(Gate::new(record.fence, heard_ms)))
        };
        let gates: HashMap<_, _> = table.spaces().map(gate).collect();
        for &lent in table.extents() {
            let at = ledger.generation_of(lent.extent);
            let standing = Standing::restored(ledger.words().clone(), at);
            gates[&lent.space].change().extents.insert(lent.extent, Extent::new(lent, standing));
        }
        Lender {
            name,
            boot: ledger.boot(),
            sums,
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

    /// Bytes that are lent, or have gone back and are not the host's again yet.
    pub(crate) fn in_use_bytes(&self) -> u64 {
        let books = self.books();
        pages_to_bytes(books.table.lent_pages() + books.table.leaving_pages())
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

    pub(crate) fn hello(
        &self,
        space: SpaceId,
        epoch: Epoch,
        lease_ms: u64,
        consumer: &str,
    ) -> Result<Borrower, Refusal> {
        let now_ms = self.now_ms();
        let mut books = self.books();
        let Books { table, ledger, gates, .. } = &mut *books;
        table.hello(space, epoch, lease_ms, consumer, now_ms)?;
        if let Some(record) = table.space(space) {
            ledger.put_space(&record);
        }
        let gate = gates.entry(space).or_insert_with(|| Arc::new(Gate::new(Epoch(0), now_ms)));
        Ok(Borrower { space, epoch, gate: gate.clone() })
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
        let extent = {
            let open = borrower.gate.enter(borrower.epoch, now_ms)?;
            open.extent(extent)?.clone()
        };
        let lent = extent.lent;
        let pinned = Pinned { lender: self, extent: Some(extent) };
        for &page in pages {
            let page = lent.page(page)?;
            let source = self.sums.get(page).map(|sum| (self.arena.page_address(page), sum));
            sink(source);
        }
        Ok(pinned)
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
    ) -> Result<(), Refusal> {
        let (data, rest) = data.as_chunks::<PAGE_SIZE>();
        assert!(rest.is_empty() && data.len() == pages.len() && sums.len() == pages.len());
        for (at, (page, &sum)) in (0..).zip(data.iter().zip(sums)) {
            if page_sum(page) != sum {
                return Err(Refusal::Corrupt(at));
            }
        }
        let open = borrower.gate.enter(borrower.epoch, now_ms)?;
        let extent = open.extent(extent)?;
        for &page in pages {
            extent.lent.page(page)?;
        }
        let _shared = extent.contents.read().expect("no thread panics in an extent");
        extent.standing.written(generation);
        for ((&page, &sum), data) in pages.iter().zip(sums).zip(data) {
            let page = extent.lent.page(page)?;
            self.arena.write_page(page, data);
            self.sums.store(page, sum);
        }
        Ok(())
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
        let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
        let extent = open.extent(extent)?;
        let _alone = extent.contents.write().expect("no thread panics in an extent");
        if !extent.standing.can_be_filled() {
            return Err(Refusal::NotFilling);
        }
        for ((page, &sum), data) in (first..).zip(sums).zip(data.as_chunks::<PAGE_SIZE>().0) {
            let at = extent.lent.page(page)?;
            let is_newer = self.sums.get(at).is_some() || extent.standing.was_discarded(page);
            // A page that has gone bad and reads as zeros is not to look like one of zeros.
            if is_newer || (sum == ZERO_PAGE_SUM && is_zero(data)) {
                continue;
            }
            self.arena.write_page(at, data);
            self.sums.store(at, sum);
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
        let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
        open.extent(extent)?.standing.confirmed(generation);
        Ok(())
    }

    /// Computes the sums of a run of pages anew, and compares them with those that came with the pages.
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
            let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
            let extent = open.extent(extent)?;
            let run = extent.lent.run(page, end - page)?;
            // A page that is being written does not match its sum.
            let _alone = extent.contents.write().expect("no thread panics in an extent");
            states.extend(run.take((until - page) as usize).map(|page| self.state_of(page)));
            page = until;
        }
        Ok(())
    }

    /// Stores a page's contents again, if those here do not match the page's sum and these do.
    pub(crate) fn repair(
        &self,
        borrower: &Borrower,
        extent: ExtentId,
        page: u32,
        data: &[u8; PAGE_SIZE],
    ) -> Result<bool, Refusal> {
        let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
        let extent = open.extent(extent)?;
        let page = extent.lent.page(page)?;
        let _alone = extent.contents.write().expect("no thread panics in an extent");
        let is_right = self.state_of(page) == PageState::Damaged(page_sum(data));
        if is_right {
            self.arena.write_page(page, data);
        }
        Ok(is_right)
    }

    /// The caller keeps writes from the page.
    fn state_of(&self, page: u64) -> PageState {
        let Some(sum) = self.sums.get(page) else { return PageState::Unwritten };
        let mut data = [0; PAGE_SIZE];
        self.arena.read_page(page, &mut data);
        if page_sum(&data) == sum { PageState::Sound(sum) } else { PageState::Damaged(sum) }
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
            let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
            open.extent(extent)?.lent.run(first, count)?
        };
        while !rest.is_empty() {
            let border = (rest.start / DISCARD_PAGES + 1) * DISCARD_PAGES;
            let run = rest.start..rest.end.min(border);
            rest.start = run.end;
            // Asked again for each part: a fence or a free may have come in between.
            let open = borrower.gate.enter(borrower.epoch, self.now_ms())?;
            let extent = open.extent(extent)?;
            let _alone = extent.contents.write().expect("no thread panics in an extent");
            let (from, pages) = (run.start - extent.lent.first_page, run.end - run.start);
            extent.standing.discarded(generation, from as u32, pages as u32);
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
        let Borrower { space, epoch, gate } = borrower;
        let now_ms = self.now_ms();
        let mut books = self.books();
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
        gate.change().extents.insert(lent.extent, Extent::new(lent, standing));
        self.publish(&books);
        Ok(lent.extent)
    }

    pub(crate) fn free(&self, borrower: &Borrower, extent: ExtentId) -> Result<(), Refusal> {
        let mut books = self.books();
        books.table.free(borrower.space, borrower.epoch, extent, self.now_ms())?;
        books.ledger.remove_extent(extent);
        let freed = borrower.gate.change().extents.remove(&extent);
        self.publish(&books);
        drop(books);
        drop(Pinned { lender: self, extent: freed });
        Ok(())
    }

    /// Takes all extents from the space. Their memory goes back when what is returned is dropped.
    pub(crate) fn free_all(&self, borrower: &Borrower) -> Result<Vec<Pinned<'_>>, Refusal> {
        let mut books = self.books();
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
        let mut books = self.books();
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

    /// When this returns, nothing of an older epoch is under way any more, and nothing is let in.
    pub(crate) fn fence(&self, borrower: &Borrower) -> Result<(), Refusal> {
        let Borrower { space, epoch, gate } = borrower;
        let mut books = self.books();
        books.table.fence(*space, *epoch, self.now_ms())?;
        if let Some(record) = books.table.space(*space) {
            books.ledger.put_space(&record);
        }
        gate.change().fence = *epoch;
        Ok(())
    }

    pub(crate) fn renew(&self, borrower: &Borrower) -> Result<(), Refusal> {
        borrower.gate.enter(borrower.epoch, self.now_ms()).map(drop)
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
        if let Err(error) = self.arena.discard(run.clone()) {
            let bytes = pages_to_bytes(run.end - run.start);
            warn!(%error, bytes, "memory could not be given back to the host");
        }
    }

    /// Makes a run read as zeros.
    fn forget(&self, run: Range<u64>) {
        if let Err(error) = self.sums.forget(run) {
            warn!(%error, "the memory of checksums could not be given back to the host");
        }
    }

    /// Empties what is not lent: a predecessor may have died before it did.
    pub(crate) fn empty_what_is_free(&self) {
        let mut lent: Vec<_> = self.books().table.extents().map(|lent| lent.pages()).collect();
        lent.sort_by_key(|pages| pages.start);
        let mut free_from = 0;
        for pages in lent {
            self.empty(free_from..pages.start);
            free_from = pages.end;
        }
        self.empty(free_from..self.arena.pages());
    }

    fn pinned(&self, extents: HashMap<ExtentId, Arc<Extent>>) -> Vec<Pinned<'_>> {
        extents.into_values().map(|extent| Pinned { lender: self, extent: Some(extent) }).collect()
    }

    /// Lets answers tell what the table says by now.
    fn publish(&self, books: &Books) {
        self.free_pages.store(books.table.lendable_pages(), Ordering::Relaxed);
        for (&space, gate) in &books.gates {
            let recalled = books.table.recalled(space).min(u64::from(u32::MAX)) as u32;
            gate.recalled.store(recalled, Ordering::Relaxed);
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no thread panics with the table")
    }
}

impl Drop for Pinned<'_> {
    /// Whoever is the last to let go of a freed extent gives its memory back. Until the extent was
    /// freed, the gate holds on to it, and this is never the last.
    ///
    /// Takes the table's lock, and so must not happen under it.
    fn drop(&mut self) {
        let Some(extent) = self.extent.take().and_then(Arc::into_inner) else { return };
        self.lender.empty(extent.lent.pages());
        let mut books = self.lender.books();
        books.table.reclaimed(extent.lent.extent);
        self.lender.publish(&books);
    }
}
