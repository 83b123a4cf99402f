//! Bounds a connection's unanswered requests and checks that each answer is due.
//!
//! Answers come in the order of the requests, so the window is a queue and not a table. An answer
//! out of turn means that the stream is not what the donor sent. The borrower then gives up the
//! connection, and with it all that might be taken for the answer to another request.

use crate::protocol::{Answer, MAX_HELD, Request};
use hecaton_memory::PAGE_SIZE;
use std::collections::VecDeque;

/// Limits of in-flight requests on a connection. Both hold; a single request is always allowed.
#[derive(Clone, Copy, Debug)]
pub struct WindowLimits {
    /// Requests without an answer.
    pub requests: usize,
    /// Bytes of page data in those requests and their answers together.
    pub payload_bytes: usize,
}

impl Default for WindowLimits {
    /// 64 requests and 2 MiB, which is 25 Gbit/s at a round trip of 0.6 ms.
    fn default() -> WindowLimits {
        WindowLimits { requests: 64, payload_bytes: 2 << 20 }
    }
}

/// An answer that was not due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("answer to request {id} when that to {due:?} was due, or of a kind that it cannot have")]
pub struct Unexpected {
    /// The request that the answer names.
    pub id: u64,
    /// The request whose answer is due.
    pub due: Option<u64>,
}

/// The in-flight requests of one connection.
#[derive(Debug)]
pub struct Window {
    limits: WindowLimits,
    due: VecDeque<Due>,
    next_id: u64,
    payload_bytes: usize,
}

#[derive(Debug)]
struct Due {
    id: u64,
    tag: u64,
    asked: Asked,
    payload_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Asked {
    Pages(usize),
    Deed,
    Extent,
    Held,
    States(usize),
    Signatures(usize),
}

impl Window {
    /// An empty window.
    pub fn new(limits: WindowLimits) -> Window {
        let due = VecDeque::with_capacity(limits.requests);
        Window { limits, due, next_id: 1, payload_bytes: 0 }
    }

    /// Whether the request may be sent now.
    pub fn has_room(&self, request: &Request<'_>) -> bool {
        self.due.is_empty()
            || self.due.len() < self.limits.requests
                && self.payload_bytes + payload_bytes(request) <= self.limits.payload_bytes
    }

    /// Enters a request that there is room for. Returns the id to send it with.
    ///
    /// # Panics
    /// If there is no room.
    pub fn admit(&mut self, tag: u64, request: &Request<'_>) -> u64 {
        assert!(self.has_room(request), "the window is full");
        let asked = match request {
            Request::Read { pages, .. } => Asked::Pages(pages.len()),
            Request::Allocate { .. } => Asked::Extent,
            Request::List { .. } => Asked::Held,
            Request::Verify { count, .. } => Asked::States(*count as usize),
            Request::Sign { count, .. } => Asked::Signatures(*count as usize),
            _ => Asked::Deed,
        };
        let id = self.next_id;
        self.next_id += 1;
        let payload_bytes = payload_bytes(request);
        self.payload_bytes += payload_bytes;
        self.due.push_back(Due { id, tag, asked, payload_bytes });
        id
    }

    /// Checks that an answer is the one that is due. Returns the tag of its request.
    pub fn check(&self, id: u64, answer: &Answer<'_>) -> Result<u64, Unexpected> {
        let due = self.due.front();
        let unexpected = Unexpected { id, due: due.map(|due| due.id) };
        let due = due.filter(|due| due.id == id).ok_or(unexpected)?;
        let fits = match (due.asked, answer) {
            (_, Answer::Refused(_)) => true,
            (Asked::Pages(asked), Answer::Pages(sums)) => sums.len() == asked,
            (Asked::Deed, Answer::Done) => true,
            (Asked::Extent, Answer::Allocated(_)) => true,
            (Asked::Held, Answer::Held(lines)) => lines.len() <= MAX_HELD,
            (Asked::States(asked), Answer::Verified(states)) => states.len() == asked,
            (Asked::Signatures(asked), Answer::Signed(signatures)) => signatures.len() == asked,
            _ => false,
        };
        if fits { Ok(due.tag) } else { Err(unexpected) }
    }

    /// Removes the request that was due: its answer is complete.
    pub fn settle(&mut self) {
        if let Some(due) = self.due.pop_front() {
            self.payload_bytes -= due.payload_bytes;
        }
    }

    /// Number of in-flight requests.
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Whether no request is in flight.
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}

fn payload_bytes(request: &Request<'_>) -> usize {
    match request {
        Request::Read { pages, .. } | Request::Write { pages, .. } => pages.len() * PAGE_SIZE,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Refusal;
    use hecaton_memory::ExtentId;

    const READ: Request<'static> = Request::Read { extent: ExtentId(1), pages: &[1, 2] };

    #[test]
    fn bounds_requests_and_bytes_but_lets_one_through() {
        let mut window = Window::new(WindowLimits { requests: 3, payload_bytes: 4 * PAGE_SIZE });
        window.admit(0, &READ);
        window.admit(0, &READ);
        assert!(!window.has_room(&READ));
        window.admit(0, &Request::Renew);
        assert!(!window.has_room(&Request::Renew));
        (0..3).for_each(|_| window.settle());
        assert!(window.is_empty());
        let large = Request::Read { extent: ExtentId(1), pages: &[0; 5] };
        assert!(window.has_room(&large));
        window.admit(0, &large);
        assert!(!window.has_room(&Request::Read { extent: ExtentId(1), pages: &[0] }));
    }

    #[test]
    fn knows_the_answer_that_is_due() {
        let mut window = Window::new(WindowLimits::default());
        let unexpected = |id, due| Err(Unexpected { id, due });
        assert_eq!(window.check(1, &Answer::Done), unexpected(1, None));
        let read = window.admit(10, &READ);
        let renew = window.admit(11, &Request::Renew);
        assert_eq!(window.check(renew, &Answer::Done), unexpected(renew, Some(read)));
        assert_eq!(window.check(read, &Answer::Done), unexpected(read, Some(read)));
        assert_eq!(window.check(read, &Answer::Pages(&[7])), unexpected(read, Some(read)));
        assert_eq!(window.check(read, &Answer::Refused(Refusal::Full)), Ok(10));
        assert_eq!(window.check(read, &Answer::Pages(&[7, 8])), Ok(10));
        window.settle();
        assert_eq!(window.check(renew, &Answer::Done), Ok(11));
        assert_eq!(
            window.check(renew, &Answer::Allocated(ExtentId(1))),
            unexpected(renew, Some(renew))
        );
    }
}
