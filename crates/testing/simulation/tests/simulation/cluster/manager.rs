//! A manager's process: its own election and registry, with letters where the product has etcd's
//! HTTP interface and its own, and two things under way at most, as it has a thread that campaigns
//! and one that writes the registry. Or one that is alone, with a file. Requests are taken while a
//! write is under way, and their answers wait for the next.

use super::file::File;
use super::keeper::{LEASE, Process};
use super::{Answer, Body, KEEPER, Letter, Question, Reply, Request, manager_host};
use crate::dice::Dice;
use crate::network::{Host, Network};
use hecaton_manager::Registry;
use hecaton_manager::records::book::{Book, Durability, Receipt, Write};
use hecaton_manager::records::election::{Election, Heard, Term};
use hecaton_manager::records::pen::{Pen, Stroke};
use std::collections::VecDeque;
use std::time::Duration;

/// Time between two questions to the keeper.
const INTERVAL: Duration = LEASE.checked_div(5).expect("five is not zero");

/// How long the keeper may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// State of the campaigning thread, with the answer that it waits for.
enum Campaign {
    Resting,
    Asking {
        call: u64,
        asked: Duration,
    },
    /// It leads, and reads what others have left.
    Reading {
        call: u64,
        term: Term,
        since: Duration,
    },
    /// It writes the epoch, before anybody is answered with it.
    Opening {
        call: u64,
        term: Term,
        stroke: Stroke,
        registry: Box<Registry>,
        since: Duration,
    },
}

/// A write that etcd has been asked for.
struct Writing {
    call: u64,
    since: Duration,
    /// The last question to the keeper, unless it was already asked a second time.
    to_repeat: Option<Question>,
    term: Term,
    /// The write in flight; none while the keeper is asked for its stamp.
    stroke: Option<Stroke>,
    write: Write,
}

/// A write that is being committed to the file.
struct Committing {
    until: Duration,
    /// Whether it is committed though the process dies meanwhile.
    outlives: bool,
    write: Write,
}

/// An answer that leaves when its change is durable.
struct Waiting {
    receipt: Receipt,
    to: Host,
    call: u64,
    reply: Reply,
}

pub(super) struct Manager {
    number: usize,
    life: u64,
    election: Election,
    book: Book,
    pen: Pen,
    campaign: Campaign,
    /// The lease that it got last.
    lease: Option<Term>,
    next_turn: Duration,
    writing: Option<Writing>,
    /// Its registry's, if that is not with the keeper.
    file: Option<File>,
    /// It has written its epoch to the file, and serves.
    is_open: bool,
    committing: Option<Committing>,
    waiting: Vec<Waiting>,
    inbox: VecDeque<(Host, u64, Request)>,
    /// Letters that have come while it was stopped.
    mail: Vec<Letter>,
    calls: u64,
    /// It is stopped until then, in the middle of anything.
    pub(super) asleep_until: Duration,
    /// There is no process until then.
    down_until: Duration,
}

impl Manager {
    pub(super) fn new(number: usize, life: u64, file: Option<File>, now: Duration) -> Manager {
        let lasting = file.as_ref().map(|file| file.lasting.clone());
        Manager {
            number,
            life,
            election: Election::new(LEASE),
            book: Book::new(lasting.map_or_else(Registry::default, Registry::new), now),
            pen: Pen::default(),
            campaign: Campaign::Resting,
            lease: None,
            next_turn: now,
            writing: None,
            file,
            is_open: false,
            committing: None,
            waiting: Vec::new(),
            inbox: VecDeque::new(),
            mail: Vec::new(),
            calls: 0,
            asleep_until: Duration::ZERO,
            down_until: Duration::ZERO,
        }
    }

    /// Its process dies; another one comes at that time.
    pub(super) fn crash(&mut self, until: Duration, now: Duration) {
        let mut file = self.file.take();
        if let Some(Committing { outlives: true, write, .. }) = &self.committing
            && let Some(file) = &mut file
        {
            file.commit(&write.changes, now);
        }
        *self = Manager::new(self.number, self.life + 1, file, now);
        self.down_until = until;
    }

    /// Its registry's file, if it has one.
    pub(super) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// The disk of its file, if it has one, is full until then, or slow.
    pub(super) fn disk_fails(&mut self, until: Duration, is_full: bool) {
        match &mut self.file {
            Some(file) if is_full => file.full_until = until,
            Some(file) => file.slow_until = until,
            None => {}
        }
    }

    /// It is there and not stopped, and so is its disk.
    pub(super) fn heal(&mut self) {
        (self.asleep_until, self.down_until) = (Duration::ZERO, Duration::ZERO);
        self.disk_fails(Duration::ZERO, true);
        self.disk_fails(Duration::ZERO, false);
        self.committing.iter_mut().for_each(|committing| committing.until = Duration::ZERO);
    }

    /// Whether it leads, as far as it knows.
    pub(super) fn leads(&self, now: Duration) -> bool {
        match self.file {
            Some(_) => self.is_open,
            None => self.election.leads(now).is_some(),
        }
    }

    fn process(&self) -> Process {
        (self.number, self.life)
    }

    pub(super) fn receive(
        &mut self,
        letter: Letter,
        now: Duration,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        if now < self.down_until {
            return;
        }
        if now < self.asleep_until {
            self.mail.push(letter);
            return;
        }
        match letter.body {
            Body::Request(request) => self.inbox.push_back((letter.from, letter.call, request)),
            Body::Answer(process, answer) if process == self.process() => {
                self.keeper_answers(letter.call, answer, now, net, dice);
            }
            _ => {}
        }
        self.serve(now, net, dice);
    }

    /// Does everything that is due by the clock.
    pub(super) fn tick(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        if now < self.down_until || now < self.asleep_until {
            return;
        }
        for letter in std::mem::take(&mut self.mail) {
            self.receive(letter, now, net, dice);
        }
        match self.campaign {
            Campaign::Resting if self.file.is_none() && self.next_turn <= now => {
                let ask = self.election.next(now);
                let call = self.question(Question::Ask(ask, self.lease), net, dice);
                self.campaign = Campaign::Asking { call, asked: now };
                self.next_turn = now + INTERVAL;
            }
            Campaign::Asking { asked, .. } if asked + PATIENCE <= now => {
                self.heard(asked, Heard::Silence, now, net, dice);
            }
            Campaign::Reading { since, .. } | Campaign::Opening { since, .. }
                if since + PATIENCE <= now =>
            {
                self.resign(now, net, dice);
            }
            _ => {}
        }
        if let Some(writing) = self.writing.take_if(|writing| writing.since + PATIENCE <= now) {
            self.pen.unsure();
            self.book.end_write(&writing.write, false);
        }
        if let Some(committing) = self.committing.take_if(|committing| committing.until <= now) {
            self.commit(committing.write, now, dice);
        }
        if self.writing.as_ref().is_some_and(|writing| writing.since + PATIENCE / 2 <= now) {
            self.repeat(net, dice);
        }
        self.serve(now, net, dice);
    }

    fn question(&mut self, question: Question, net: &mut Network, dice: &mut Dice) -> u64 {
        self.calls += 1;
        self.post(self.calls, question, net, dice);
        self.calls
    }

    fn post(&self, call: u64, question: Question, net: &mut Network, dice: &mut Dice) {
        let (from, body) = (manager_host(self.number), Body::Question(self.process(), question));
        net.post(Letter { from, to: KEEPER, call, body }, dice);
    }

    /// Asks another member for what is being written, once: the first one may have it, and only
    /// hang. False if that was done before.
    fn repeat(&mut self, net: &mut Network, dice: &mut Dice) -> bool {
        let Some(writing) = &mut self.writing else { return false };
        let Some(question) = writing.to_repeat.take() else { return false };
        let call = writing.call;
        self.post(call, question, net, dice);
        true
    }

    /// Asks for what `writing` needs next: to be written, or first what is there.
    fn write(&mut self, mut writing: Writing, net: &mut Network, dice: &mut Dice) {
        if self.book.term() != Some(writing.term) {
            // Another registry was taken over meanwhile.
            return;
        }
        writing.stroke = self.pen.stroke(writing.term);
        let question = match writing.stroke {
            Some(stroke) => Question::Write(writing.term, stroke, writing.write.changes.clone()),
            None => Question::Look,
        };
        writing.to_repeat = Some(question.clone());
        writing.call = self.question(question, net, dice);
        self.writing = Some(writing);
    }

    /// Commits to the file, if that takes no time.
    fn commit(&mut self, write: Write, now: Duration, dice: &mut Dice) {
        let Some(file) = &mut self.file else { return };
        if now < file.slow_until {
            let (until, outlives) = (file.slow_until, dice.below(2) == 0);
            self.committing = Some(Committing { until, outlives, write });
            return;
        }
        let is_taken = file.commit(&write.changes, now);
        self.book.end_write(&write, is_taken);
    }

    /// Sends the answers that may leave, and begins the write that the others wait for.
    fn release(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        while self.writing.is_none()
            && self.committing.is_none()
            && let Some(write) = self.book.begin_write()
        {
            match (self.file.is_some(), write.term()) {
                (false, Some(term)) => {
                    let (stroke, to_repeat) = (None, None);
                    let writing = Writing { call: 0, since: now, to_repeat, term, stroke, write };
                    self.write(writing, net, dice);
                }
                _ => self.commit(write, now, dice),
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            let Waiting { receipt, to, call, .. } = waiting;
            match self.book.durability(receipt) {
                Durability::Durable => self.reply(to, call, waiting.reply, net, dice),
                Durability::Pending => self.waiting.push(waiting),
                Durability::Failed | Durability::Superseded => {
                    self.reply(to, call, Reply::Unwritten, net, dice);
                }
            }
        }
    }

    fn reply(&self, to: Host, call: u64, reply: Reply, net: &mut Network, dice: &mut Dice) {
        let from = manager_host(self.number);
        net.post(Letter { from, to, call, body: Body::Reply(reply) }, dice);
    }

    fn keeper_answers(
        &mut self,
        call: u64,
        answer: Answer,
        now: Duration,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let is_of_writing = self.writing.as_ref().is_some_and(|writing| writing.call == call);
        if is_of_writing && matches!(answer, Answer::Broken) && self.repeat(net, dice) {
            return;
        }
        if let Some(writing) = self.writing.take_if(|writing| writing.call == call) {
            match (writing.stroke, answer) {
                (Some(stroke), Answer::Written) => {
                    self.pen.taken(stroke);
                    self.book.end_write(&writing.write, true);
                }
                (_, Answer::Stamp(stamp)) => {
                    self.pen.found(stamp);
                    self.write(writing, net, dice);
                }
                (_, Answer::Overtaken) => {
                    self.pen.unsure();
                    self.write(writing, net, dice);
                }
                _ => {
                    self.pen.unsure();
                    self.book.end_write(&writing.write, false);
                }
            }
            return;
        }
        match (std::mem::replace(&mut self.campaign, Campaign::Resting), answer) {
            (Campaign::Asking { call: asked_in, asked }, Answer::Heard(heard))
                if asked_in == call =>
            {
                self.heard(asked, heard, now, net, dice);
            }
            (Campaign::Reading { call: asked_in, term, .. }, Answer::Lasting(lasting, stamp))
                if asked_in == call =>
            {
                let registry = Box::new(Registry::new(lasting));
                let changes = registry.changes().clone();
                self.pen.found(stamp);
                let stroke = self.pen.stroke(term).expect("it was looked what is there");
                let call = self.question(Question::Write(term, stroke, changes), net, dice);
                self.campaign = Campaign::Opening { call, term, stroke, registry, since: now };
            }
            (
                Campaign::Opening { call: asked_in, term, stroke, mut registry, .. },
                Answer::Written,
            ) if asked_in == call => {
                self.pen.taken(stroke);
                registry.written();
                self.book.take_over(term, *registry, now);
                self.writing = None;
            }
            (Campaign::Asking { call: asked_in, asked }, _) if asked_in == call => {
                self.heard(asked, Heard::Silence, now, net, dice);
            }
            (
                Campaign::Reading { call: asked_in, .. } | Campaign::Opening { call: asked_in, .. },
                _,
            ) if asked_in == call => {
                self.resign(now, net, dice);
            }
            // An answer to a question that was given up.
            (campaign, _) => self.campaign = campaign,
        }
    }

    fn heard(
        &mut self,
        asked: Duration,
        heard: Heard,
        now: Duration,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        if let Heard::Won(term) = heard {
            self.lease = Some(term);
        }
        let _ = self.election.hear(asked, now, heard);
        self.campaign = Campaign::Resting;
        if let Some(term) = self.election.leads(now)
            && self.book.term() != Some(term)
        {
            let call = self.question(Question::Read, net, dice);
            self.campaign = Campaign::Reading { call, term, since: now };
        }
    }

    /// Another manager may be able to.
    fn resign(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        self.campaign = Campaign::Resting;
        self.pen.unsure();
        let _ = self.election.hear(now, now, Heard::Gone);
        if let Some(lease) = self.lease.take() {
            self.question(Question::Revoke(lease), net, dice);
        }
    }

    /// Answers what it was asked, one after the other.
    fn serve(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        if let Some(file) = self.file.as_mut().filter(|_| !self.is_open) {
            let (_, receipt) = self.book.change(now, |_, _| ());
            if let Some(write) = self.book.begin_write() {
                let is_taken = file.commit(&write.changes, now);
                self.book.end_write(&write, is_taken);
            }
            self.is_open = self.book.durability(receipt) == Durability::Durable;
            file.opened += u64::from(self.is_open);
            if !self.is_open {
                // It has not started, and is started again.
                return self.inbox.clear();
            }
        }
        while let Some((from, call, request)) = self.inbox.pop_front() {
            if self.file.is_none() && !self.book.is_of(self.election.leads(now)) {
                self.reply(from, call, Reply::NotLeading, net, dice);
                continue;
            }
            let (reply, receipt) = self.book.change(now, |registry, now| match request {
                Request::Beat(report) => {
                    let name = report.name.clone();
                    Reply::Beat(registry.heartbeat(now, &name, *report).map(Box::new).map_err(drop))
                }
                Request::Drain(donor, draining) => match registry.drain(&donor, draining) {
                    true => Reply::Done,
                    false => Reply::NoDonor,
                },
                Request::Limit(donor, limit) => match registry.limit(&donor, limit) {
                    true => Reply::Done,
                    false => Reply::NoDonor,
                },
            });
            match reply {
                // A refusal promises nothing.
                Reply::NoDonor | Reply::Beat(Err(())) => {
                    self.reply(from, call, reply, net, dice);
                }
                reply => self.waiting.push(Waiting { receipt, to: from, call, reply }),
            }
        }
        self.release(now, net, dice);
    }
}
