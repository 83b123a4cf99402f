//! A program that fills its memory, compares all of it whenever it is told to by a line, and says
//! so.

use crate::harness::process::Running;
use anyhow::{Context as _, ensure};
use std::{
    io::{BufRead as _, BufReader, Lines, Write as _},
    process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

pub(crate) struct Verifier {
    running: Running,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Verifier {
    /// Its memory is filled.
    pub(crate) fn start(command: &mut Command) -> anyhow::Result<Verifier> {
        let mut running = Running::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let input = running.child_mut().stdin.take().context("no input")?;
        let output = running.output()?;
        let mut verifier = Verifier { running, input, lines: BufReader::new(output).lines() };
        verifier.expect("filled")?;
        Ok(verifier)
    }

    /// The next line of the program's output; `None` after the program has ended.
    pub(crate) fn says(&mut self) -> anyhow::Result<Option<String>> {
        Ok(self.lines.next().transpose()?)
    }

    fn expect(&mut self, wanted: &str) -> anyhow::Result<()> {
        let said = self.says()?;
        ensure!(said.as_deref() == Some(wanted), "the program says {said:?}");
        Ok(())
    }

    /// It compares what it has with what it wrote.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        self.begin_check()?;
        self.end_check()
    }

    pub(crate) fn begin_check(&mut self) -> anyhow::Result<()> {
        Ok(writeln!(self.input)?)
    }

    pub(crate) fn end_check(&mut self) -> anyhow::Result<()> {
        self.expect("checked")
    }

    /// Waits for its end, of whatever kind.
    pub(crate) fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        self.running.wait(limit, || Ok(()))
    }

    /// It is told nothing more, and ends.
    pub(crate) fn finish(self, limit: Duration) -> anyhow::Result<()> {
        let Verifier { mut running, input, .. } = self;
        drop(input);
        let status = running.wait(limit, || Ok(()))?;
        ensure!(status.success(), "the program ended with {status}");
        Ok(())
    }
}
