//! Compares findings with the recorded counts, and rewrites the counts.

use crate::rule::{Finding, Rule};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

const TITLE: &str = "\
# Today's offenders of the rules that `make tidy` checks. A count may shrink and must not grow.
#
#   HECATON_TIDY_UPDATE=1 make tidy        writes lower counts, after an improvement
#   HECATON_TIDY_UPDATE=accept make tidy   writes every count, after a move of files
";

/// Recorded values by rule and path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    values: BTreeMap<(Rule, String), u32>,
}

/// A counts file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CountsError {
    /// The text is not a table of tables of numbers.
    #[error(
        "cannot parse the counts; correct the TOML, or write the file anew with HECATON_TIDY_UPDATE=accept"
    )]
    Toml(#[from] toml::de::Error),
    /// A table has the name of no rule.
    #[error("no rule is named: {0}; correct the table's name")]
    Rule(String),
}

/// Which counts an update may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Writes nothing.
    Check,
    /// Writes lower counts and removes entries that ended.
    Lower,
    /// Writes every count, lower or higher.
    Accept,
}

/// One value that differs from the recorded one. Absent values are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The finding of today. Its value is 0 if the entry vanished.
    pub finding: Finding,
    /// The recorded value.
    pub recorded: u32,
}

/// Outcome of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// New offenders and values that grew.
    pub grown: Vec<Change>,
    /// Values that shrank and entries that vanished.
    pub shrunk: Vec<Change>,
}

impl Counts {
    /// Parses a counts file.
    ///
    /// # Errors
    ///
    /// The text is not valid TOML, or a table has the name of no rule.
    pub fn parse(text: &str) -> Result<Counts, CountsError> {
        let tables: BTreeMap<String, BTreeMap<String, u32>> = toml::from_str(text)?;
        let mut values = BTreeMap::new();
        for (name, table) in tables {
            let rule = Rule::ALL.into_iter().find(|rule| rule.name() == name);
            let rule = rule.ok_or(CountsError::Rule(name))?;
            values.extend(table.into_iter().map(|(path, value)| ((rule, path), value)));
        }
        Ok(Counts { values })
    }

    /// The counts of these findings.
    pub fn of(findings: &[Finding]) -> Counts {
        let values =
            findings.iter().map(|found| ((found.rule, found.path.clone()), found.value)).collect();
        Counts { values }
    }

    /// The text of a counts file, sorted by rule and path.
    pub fn render(&self) -> String {
        let mut text = TITLE.to_owned();
        for rule in Rule::ALL {
            let _ = write!(text, "\n# {}\n[{}]\n", rule.meaning(), rule.name());
            for ((_, path), value) in self.values.iter().filter(|((of, _), _)| *of == rule) {
                let _ = writeln!(text, "{path:?} = {value}");
            }
        }
        text
    }

    /// The counts to record after a comparison with `today`.
    pub fn updated(&self, today: &Counts, mode: Mode) -> Counts {
        match mode {
            Mode::Check => self.clone(),
            Mode::Accept => today.clone(),
            Mode::Lower => {
                let lower = |(key, value): (&(Rule, String), &u32)| {
                    today.values.get(key).map(|now| (key.clone(), *value.min(now)))
                };
                Counts { values: self.values.iter().filter_map(lower).collect() }
            }
        }
    }

    /// Number of entries of `rule`, and the sum of their values.
    pub fn totals(&self, rule: Rule) -> (usize, u32) {
        let of_rule = self.values.iter().filter(|((of, _), _)| *of == rule);
        of_rule.fold((0, 0), |(entries, sum), (_, value)| (entries + 1, sum + value))
    }

    fn get(&self, rule: Rule, path: &str) -> u32 {
        self.values.get(&(rule, path.to_owned())).copied().unwrap_or(0)
    }
}

/// Compares `findings` with the recorded counts.
pub fn compare(recorded: &Counts, findings: &[Finding]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut seen = BTreeSet::new();
    for finding in findings {
        seen.insert((finding.rule, finding.path.clone()));
        let before = recorded.get(finding.rule, &finding.path);
        let change = Change { finding: finding.clone(), recorded: before };
        match finding.value.cmp(&before) {
            std::cmp::Ordering::Greater => verdict.grown.push(change),
            std::cmp::Ordering::Less => verdict.shrunk.push(change),
            std::cmp::Ordering::Equal => {}
        }
    }
    for ((rule, path), value) in &recorded.values {
        if !seen.contains(&(*rule, path.clone())) {
            let finding =
                Finding { rule: *rule, path: path.clone(), value: 0, detail: String::new() };
            verdict.shrunk.push(Change { finding, recorded: *value });
        }
    }
    verdict
}

impl Verdict {
    /// Describes every growth with its way out. Empty if nothing grew.
    pub fn failures(&self) -> String {
        let mut text = String::new();
        for Change { finding, recorded } in &self.grown {
            let Finding { rule, path, value, detail } = finding;
            let _ = writeln!(text, "{}: {path}: {recorded} -> {value}", rule.name());
            for line in detail.lines() {
                let _ = writeln!(text, "    {line}");
            }
            let _ = writeln!(text, "    way out: {}", rule.way_out());
        }
        if !text.is_empty() {
            text += "after a move of files, or for an agreed exception: \
                     HECATON_TIDY_UPDATE=accept make tidy\n";
        }
        text
    }

    /// Describes every improvement. Empty if nothing shrank.
    pub fn notes(&self) -> String {
        let mut text = String::new();
        for Change { finding, recorded } in &self.shrunk {
            let Finding { rule, path, value, .. } = finding;
            let _ = writeln!(text, "improved: {}: {path}: {recorded} -> {value}", rule.name());
        }
        if !text.is_empty() {
            text += "record the improvement: HECATON_TIDY_UPDATE=1 make tidy\n";
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, value: u32) -> Finding {
        Finding { rule: Rule::Lines, path: path.to_owned(), value, detail: String::new() }
    }

    #[test]
    fn compare_separates_growth_from_improvement() {
        let recorded = Counts::of(&[lines("a", 510), lines("b", 510), lines("c", 510)]);
        let verdict = compare(&recorded, &[lines("a", 511), lines("b", 509), lines("d", 501)]);
        let grown = [(lines("a", 511), 510), (lines("d", 501), 0)];
        let shrunk = [(lines("b", 509), 510), (lines("c", 0), 510)];
        let change = |(finding, recorded)| Change { finding, recorded };
        assert_eq!(verdict.grown, grown.map(change));
        assert_eq!(verdict.shrunk, shrunk.map(change));
        assert_eq!(compare(&recorded, &[lines("a", 510)]).failures(), "");
    }

    #[test]
    fn update_lowers_counts_and_raises_none() {
        let recorded = Counts::of(&[lines("a", 510), lines("b", 510), lines("c", 510)]);
        let today = Counts::of(&[lines("a", 511), lines("b", 509), lines("d", 501)]);
        let lowered = Counts::of(&[lines("a", 510), lines("b", 509)]);
        assert_eq!(recorded.updated(&today, Mode::Lower), lowered);
        assert_eq!(recorded.updated(&today, Mode::Accept), today);
        assert_eq!(recorded.updated(&today, Mode::Check), recorded);
    }

    #[test]
    fn parse_reads_what_render_writes() {
        let circle =
            Finding { rule: Rule::Circles, path: "a \"b\".rs".into(), ..lines("", 2).clone() };
        let counts = Counts::of(&[lines("a/b.rs", 510), lines("c", 900), circle]);
        assert_eq!(Counts::parse(&counts.render()).expect("valid"), counts);
        assert_eq!(counts.totals(Rule::Lines), (2, 1410));
    }

    #[test]
    fn parse_refuses_an_unknown_rule() {
        let error = Counts::parse("[lnies]\n").expect_err("unknown");
        assert_eq!(error.to_string(), "no rule is named: lnies; correct the table's name");
        assert!(Counts::parse("[lines]\na = -1\n").is_err());
    }

    #[test]
    fn failures_name_rule_path_values_and_way_out() {
        let grown = Finding { detail: "one\ntwo".into(), ..lines("a.rs", 501) };
        let text = compare(&Counts::default(), &[grown]).failures();
        assert!(text.starts_with("lines: a.rs: 0 -> 501\n    one\n    two\n    way out: split"));
        assert!(text.ends_with("HECATON_TIDY_UPDATE=accept make tidy\n"));
    }

    #[test]
    fn notes_tell_how_to_record_an_improvement() {
        let text = compare(&Counts::of(&[lines("a.rs", 501)]), &[]).notes();
        assert!(text.starts_with("improved: lines: a.rs: 501 -> 0\n"));
        assert!(text.ends_with("HECATON_TIDY_UPDATE=1 make tidy\n"));
    }
}
