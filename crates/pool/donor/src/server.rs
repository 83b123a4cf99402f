//! Answers the requests of one connection to a donor.
//!
//! A read goes from the arena to the socket with one gathered send. Pages that were never written
//! are sent from one page of zeros that all connections share. A write is complete in the
//! connection's buffer when this module sees it, and all its pages are verified before a byte is
//! stored.

use crate::lender::{Borrower, Lender, Place};
use crate::metrics::ShardId;
use crate::pages::fill::{self, Introduction, Source};
use crate::parking::park::Park;
use hecaton_memory::{ExtentId, PAGE_SIZE, PageSignature, PageSum, ZERO_PAGE_SUM, random_u64};
use hecaton_transport::protocol::{
    HeldExtent, Hello, MAX_PAGES, PageState, Refusal, Request, VERSIONS, Welcome,
};
use hecaton_transport::server::{Caller, Replied, Reply, Service};
use hecaton_transport::tls::CredentialsDir;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, info};

static ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The donor's end of the page protocol.
pub(crate) struct PageService {
    lender: Arc<Lender>,
    /// Credentials presented to donors that a fill copies from.
    credentials: Option<Arc<CredentialsDir>>,
}

impl PageService {
    pub(crate) fn new(
        lender: Arc<Lender>,
        credentials: Option<Arc<CredentialsDir>>,
    ) -> PageService {
        PageService { lender, credentials }
    }
}

/// State of one connection. All requests reuse its buffers; `sums` and `parts` never grow.
pub(crate) struct Session {
    lender: Arc<Lender>,
    borrower: Borrower,
    /// Hello and credentials for donors that a fill copies from.
    introduction: Introduction,
    source: Option<Source>,
    shard: ShardId,
    sums: Vec<PageSum>,
    parts: Parts,
    /// Pages read from the park file; sized for the largest read at first use.
    parked: Vec<[u8; PAGE_SIZE]>,
    lines: Vec<HeldExtent>,
    states: Vec<PageState>,
    signatures: Vec<PageSignature>,
}

struct Parts(Vec<libc::iovec>);

// SAFETY: the pointers are only set and used within one call of `PageService::handle`.
unsafe impl Send for Parts {}

impl Drop for Session {
    fn drop(&mut self) {
        self.lender.bye(&self.borrower);
        self.lender.metrics.disconnected();
    }
}

impl Service for PageService {
    type Session = Session;

    fn hello(&self, hello: &Hello, caller: Caller<'_>) -> Result<(Welcome, Session), Refusal> {
        let lender = &self.lender;
        let Caller { address: peer, node, .. } = caller;
        let borrower = lender.hello(hello, caller).inspect_err(|&refusal| {
            info!(%peer, node, space = %hello.space, %refusal, "a borrower is not welcome");
            lender.metrics.not_welcomed(refusal);
        })?;
        debug!(%peer, space = %hello.space, consumer = hello.consumer, "a borrower has connected");
        let welcome = Welcome {
            version: 0,
            boot: lender.boot(),
            donor: lender.name().to_owned(),
            load: lender.load(&borrower),
        };
        let session = Session {
            lender: lender.clone(),
            borrower,
            introduction: Introduction {
                hello: Hello { lane: random_u64(), versions: VERSIONS, ..hello.clone() },
                credentials: self.credentials.clone(),
            },
            source: None,
            shard: lender.metrics.connected(),
            sums: Vec::with_capacity(MAX_PAGES),
            parts: Parts(Vec::with_capacity(MAX_PAGES)),
            parked: Vec::new(),
            lines: Vec::new(),
            states: Vec::new(),
            signatures: Vec::new(),
        };
        Ok((welcome, session))
    }

    fn handle(
        &self,
        session: &mut Session,
        request: Request<'_>,
        data: &[u8],
        reply: Reply<'_>,
    ) -> Replied {
        let lender = &*self.lender;
        lender.begin_service();
        let replied = session.answer(lender, request, data, reply);
        lender.end_service();
        replied
    }
}

impl Session {
    fn answer(
        &mut self,
        lender: &Lender,
        request: Request<'_>,
        data: &[u8],
        reply: Reply<'_>,
    ) -> Replied {
        let begun = Instant::now();
        let Session { borrower, shard, .. } = self;
        let shard = *shard;
        let done = match request {
            Request::Read { extent, pages } => {
                return self.send_pages(lender, extent, pages, begun, reply);
            }
            Request::Write { extent, generation, pages, sums } => {
                let now_ms = lender.now_ms();
                let to = (extent, generation);
                let written = lender.write(borrower, to, pages, sums, data, now_ms);
                written.map(|written| {
                    lender.metrics.written(shard, pages.len(), begun.elapsed());
                    if let Some(park) = lender.parks_in().filter(|_| written.to_parked) {
                        park.let_keeper_catch_up();
                    }
                })
            }
            Request::Discard { extent, generation, first, count } => {
                let discarded = lender.discard(borrower, (extent, generation), first, count);
                discarded.map(|()| lender.metrics.discarded(shard, count))
            }
            Request::Allocate { segment, member, order, generation } => {
                match lender.allocate(borrower, (segment, member), order, generation) {
                    Ok(extent) => {
                        lender.metrics.allocated(shard);
                        return reply.allocated(extent, lender.load(borrower));
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            Request::Fill { extent, first, count, source } => {
                let Session { borrower, introduction, source: kept, .. } = self;
                // A borrower that may not fill here must not cause reads at another donor.
                let filled = lender.renew(borrower).and_then(|()| {
                    fill::copy(kept, &source, introduction, (first, count), |first, sums, data| {
                        lender.fill(borrower, extent, first, sums, data)
                    })
                });
                filled.map(|()| lender.metrics.filled(shard, count))
            }
            Request::Verify { extent, first, count } => {
                match lender.verify(borrower, extent, (first, count), &mut self.states) {
                    Ok(()) => {
                        lender.metrics.verified(shard, &self.states);
                        return reply.verified(&self.states, lender.load(borrower));
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            Request::Sign { extent, first, count } => {
                match lender.sign(borrower, extent, (first, count), &mut self.signatures) {
                    Ok(()) => return reply.signed(&self.signatures, lender.load(borrower)),
                    Err(refusal) => Err(refusal),
                }
            }
            Request::Repair { extent, first, count, source } => {
                let Session { borrower, introduction, source: kept, states, .. } = self;
                lender.verify(borrower, extent, (first, count), states).and_then(|()| {
                    let is_damaged = |state: &PageState| matches!(state, PageState::Damaged(_));
                    let pages = (first..).zip(&*states).filter(|(_, state)| is_damaged(state));
                    let pages = pages.map(|(page, _)| page);
                    fill::read_each(kept, &source, introduction, pages, |page, data| {
                        let is_repaired = lender.repair(borrower, extent, page, data)?;
                        lender.metrics.repaired(shard, is_repaired.into());
                        Ok(())
                    })
                })
            }
            Request::Confirm { extent, generation } => lender.confirm(borrower, extent, generation),
            Request::Free { extent } => {
                let freed = lender.free(borrower, extent);
                freed.map(|()| lender.metrics.freed(shard, 1))
            }
            Request::FreeAll => match lender.free_all(borrower) {
                Ok(freed) => {
                    // Reclaiming some gigabytes takes seconds; the borrower need not wait for it.
                    lender.metrics.freed(shard, freed.len());
                    let replied = reply.done(lender.load(borrower));
                    drop(freed);
                    return replied;
                }
                Err(refusal) => Err(refusal),
            },
            Request::List { from } => match lender.list(borrower, from, &mut self.lines) {
                Ok(()) => return reply.held(&self.lines, lender.load(borrower)),
                Err(refusal) => Err(refusal),
            },
            Request::Fence => lender.fence(borrower),
            Request::Renew => lender.renew(borrower),
            Request::Admit { node } => lender.admit(borrower, node),
            Request::Bequeath { node } => lender.bequeath(borrower, node),
        };
        match done {
            Ok(()) => reply.done(lender.load(&self.borrower)),
            Err(refusal) => refuse(lender, &self.borrower, shard, refusal, reply),
        }
    }

    fn send_pages(
        &mut self,
        lender: &Lender,
        extent: ExtentId,
        pages: &[u32],
        begun: Instant,
        reply: Reply<'_>,
    ) -> Replied {
        let Session { borrower, shard, sums, parts: Parts(parts), parked, .. } = self;
        sums.clear();
        parts.clear();
        parked.clear();
        let mut to_read = Vec::new();
        let mut zero_pages = 0;
        let pinned = lender.read(borrower, extent, pages, lender.now_ms(), |(page, place)| {
            let (address, sum) = match place {
                Place::Memory(sum) => (lender.arena().page_address(page), sum),
                Place::Unwritten => {
                    zero_pages += 1;
                    (ZERO_PAGE.as_ptr(), ZERO_PAGE_SUM)
                }
                Place::Parked(sum) => {
                    // A push must not move the pages, and no request has more pages than this.
                    parked.reserve_exact(MAX_PAGES - parked.len());
                    parked.push([0; PAGE_SIZE]);
                    to_read.push((page, sum));
                    (parked[parked.len() - 1].as_ptr(), sum)
                }
            };
            sums.push(sum);
            append(parts, address);
        });
        match pinned {
            Ok(pinned) => {
                if let Some(park) = lender.parks_in() {
                    read_parked(park, &to_read, parked);
                }
                // SAFETY: the parts are pages of the arena, which the lender keeps mapped, the
                // session's own, or the static page of zeros.
                let replied = unsafe { reply.pages(sums, parts, lender.load(borrower)) };
                drop(pinned);
                lender.metrics.read(*shard, pages.len(), zero_pages, begun.elapsed());
                replied
            }
            Err(refusal) => refuse(lender, borrower, *shard, refusal, reply),
        }
    }
}

/// Reads parked pages from the file, each contiguous run at once.
fn read_parked(park: &Park, mut to_read: &[(u64, PageSum)], mut into: &mut [[u8; PAGE_SIZE]]) {
    while let Some(&(first, _)) = to_read.first() {
        let follows = |&(at, &(page, _)): &(u64, &(u64, PageSum))| page == first + at;
        let length = (0..).zip(to_read).take_while(follows).count();
        let (run, rest) = to_read.split_at(length);
        let (pages, others) = into.split_at_mut(length);
        let sums: Vec<PageSum> = run.iter().map(|(_, sum)| *sum).collect();
        park.read(first, &sums, pages);
        (to_read, into) = (rest, others);
    }
}

/// Adds a page to the list to send; merges it with its neighbour in memory.
fn append(parts: &mut Vec<libc::iovec>, page: *const u8) {
    if let Some(last) = parts.last_mut()
        && last.iov_base.wrapping_byte_add(last.iov_len).cast_const().cast() == page
    {
        last.iov_len += PAGE_SIZE;
        return;
    }
    parts.push(libc::iovec { iov_base: page.cast_mut().cast(), iov_len: PAGE_SIZE });
}

fn refuse(
    lender: &Lender,
    borrower: &Borrower,
    shard: ShardId,
    refusal: Refusal,
    reply: Reply<'_>,
) -> Replied {
    lender.metrics.refused(shard, refusal);
    reply.refused(refusal, lender.load(borrower))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_sent_as_one_and_zeros_are_not() {
        let pages = [[0u8; PAGE_SIZE]; 3];
        let mut parts = Vec::new();
        for page in [&pages[0], &pages[1], &pages[0], &ZERO_PAGE, &ZERO_PAGE, &pages[2]] {
            append(&mut parts, page.as_ptr());
        }
        let lengths: Vec<_> = parts.iter().map(|part| part.iov_len / PAGE_SIZE).collect();
        assert_eq!(lengths, [2, 1, 1, 1, 1]);
    }
}
