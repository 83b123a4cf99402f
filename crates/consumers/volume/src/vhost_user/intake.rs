//! The requests of a queue that its threads have taken and not answered yet.
//!
//! Short reads and writes start as they come ([`flow`](crate::volume::flow)), without a thread
//! each. The guest gets the answers to all that have ended meanwhile together. A request that would
//! have to wait gets a thread of its own.

use super::Memory;
use super::chain::Chain;
use super::drive::Drive;
use super::request::{self, Short, Status};
use crate::BlockError;
use crate::requests::spare::Spare;
use crate::volume::flow::{self, Begun, Ended, Flow, Unfinished};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use vm_memory::GuestAddress;

/// A request by its head, and how many bytes of the guest's buffers count as written.
pub(super) type Answer = (u16, u32);

/// A request that was begun.
pub(super) struct Asked {
    head: u16,
    chain: Chain,
    /// The guest's, as it was when the chain was checked.
    memory: Arc<Memory>,
}

/// Work that a thread does without the turn.
pub(super) enum Todo {
    /// The request with this head, from its beginning.
    Serve(u16),
    /// Writes that were begun and have failed.
    Finish(Unfinished<Asked>),
}

/// State that belongs to the thread with the turn.
pub(super) struct Intake {
    drive: Drive,
    flow: Flow<Asked>,
    /// For threads of their own.
    todo: VecDeque<Todo>,
    /// Answers that the guest has not got yet.
    answers: Vec<Answer>,
    spare: Spare,
}

impl Asked {
    /// Tells the guest how it ended.
    pub(super) fn answer(&self, result: Result<(), BlockError>) -> Answer {
        self.end(result.map_or_else(Status::from, |()| Status::Done))
    }

    /// Gives the guest what was read.
    fn give(&self, data: &[u8]) -> Answer {
        let given = self.chain.writable.store(&self.memory, 0, data);
        self.end(given.map_or_else(Status::from, |()| Status::Done))
    }

    fn end(&self, status: Status) -> Answer {
        // There was room for the status when the request was begun, and the memory is the same.
        (self.head, request::answer(&self.memory, &self.chain, status).unwrap_or(0))
    }
}

impl Intake {
    pub(super) fn new(drive: Drive) -> Intake {
        let flow = Flow::new(Arc::clone(&drive.volume));
        let (todo, answers) = (VecDeque::new(), Vec::new());
        let spare = Spare::new(flow::MAX_UNDER_WAY);
        Intake { drive, flow, todo, answers, spare }
    }

    /// Whether nothing is under way that others may wait for.
    pub(super) fn is_idle(&self) -> bool {
        self.flow.is_idle()
    }

    /// Whether one more may be taken.
    pub(super) fn has_room(&self) -> bool {
        self.todo.is_empty() && self.flow.len() < flow::MAX_UNDER_WAY
    }

    /// Whether there is anything for a thread of its own.
    pub(super) fn has_todo(&self) -> bool {
        !self.todo.is_empty()
    }

    /// Next work for a thread of its own.
    pub(super) fn next(&mut self) -> Option<Todo> {
        self.todo.pop_front()
    }

    /// Takes this instead of what others wait for, if there is such: that comes first.
    pub(super) fn urgent(&mut self, mut todo: Todo) -> Todo {
        if let Some(front @ Todo::Finish(_)) = self.todo.front_mut() {
            std::mem::swap(front, &mut todo);
        }
        todo
    }

    /// Takes the answers that the guest can get.
    pub(super) fn answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Begins a request, or leaves it to a thread of its own.
    pub(super) fn begin(
        &mut self,
        memory: Arc<Memory>,
        table: GuestAddress,
        descriptors: u16,
        head: u16,
    ) {
        let chain = Chain::read(&memory, table, descriptors, head).ok();
        let short =
            chain.and_then(|chain| Some((request::short(&self.drive, &memory, &chain)?, chain)));
        let Some((short, chain)) = short else {
            self.todo.push_back(Todo::Serve(head));
            return;
        };
        let begun = match short {
            Short::Read { offset, bytes } => {
                let data = self.spare.take(bytes);
                self.flow.read(Asked { head, chain, memory }, offset, bytes, data)
            }
            Short::Write { offset, bytes } => {
                let mut data = self.spare.take(bytes);
                let data_of = request::load(&memory, &chain, &mut data[..bytes]);
                let asked = Asked { head, chain, memory };
                let begun = match data_of {
                    Ok(()) => self.flow.write(asked, offset, &data[..bytes]),
                    Err(_) => Begun::Not(asked),
                };
                self.spare.keep(data);
                begun
            }
        };
        match begun {
            Begun::UnderWay => {}
            Begun::Ended(ended) => self.ended(ended),
            Begun::Not(asked) => self.todo.push_back(Todo::Serve(asked.head)),
        }
    }

    /// Has donors asked for what was begun.
    pub(super) fn send(&mut self) {
        self.flow.send();
    }

    /// Waits until the guest kicks, the queue is stopped, or donors have answered. Returns the
    /// events of `kick` and `stop`. Neither is polled while there is no room: a guest that has
    /// filled the queue, or that has gone, is heard afterwards.
    pub(super) fn wait(
        &mut self,
        kick: BorrowedFd<'_>,
        stop: BorrowedFd<'_>,
    ) -> io::Result<[PollFlags; 2]> {
        let wanted = if self.has_room() { PollFlags::IN } else { PollFlags::empty() };
        let (found, of_donors) = self.flow.wait([(kick, wanted), (stop, wanted)])?;
        if of_donors {
            self.progress(None);
        }
        Ok(found)
    }

    /// Takes what donors have answered; waits so long for the first of it.
    pub(super) fn progress(&mut self, wait: Option<Duration>) {
        let mut all = Vec::new();
        self.flow.progress(wait, &mut |ended| all.push(ended));
        all.into_iter().for_each(|ended| self.ended(ended));
    }

    /// Notes how a request ended that was under way.
    fn ended(&mut self, ended: Ended<Asked>) {
        match ended {
            Ended::Read(asked, data, _) => {
                // The buffer may be longer.
                let bytes = asked.chain.writable.bytes() as usize - 1;
                self.answers.push(asked.give(&data[..bytes]));
                self.spare.keep(data);
            }
            Ended::Written(asked) => self.answers.push(asked.answer(Ok(()))),
            Ended::Unread(asked) => self.todo.push_back(Todo::Serve(asked.head)),
            // First: it has pages that others may wait for.
            Ended::Unwritten(unfinished) => self.todo.push_front(Todo::Finish(unfinished)),
        }
    }
}
