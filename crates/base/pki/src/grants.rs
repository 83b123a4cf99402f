//! Decides what an authority's tokens allow, and formats their file. Pure.
//!
//! Each line of the file is `HASH ENDS USES NAME`, followed by ` NAME:KEY` for each use:
//! - `HASH`: SHA-256 of the token's secret; `ENDS`: its end in Unix seconds; `USES`: uses left.
//! - `NAME`: the only name that may use the token, or `*` for any name.
//! - `NAME:KEY`: a name that has used the token, and the SHA-256 of the key that was certified.
//!
//! An answer may be lost on its way, so a repeated request with the same key is answered again.

use crate::token::{hex, sha256, unhex};

/// Most tokens that have not ended.
pub(crate) const MAX_TOKENS: usize = 4096;

/// In the place of a name: any name may use the token.
const ANYBODY: &str = "*";

/// Permission that one token gives.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Grant {
    secret_hash: String,
    ends_unix_s: i64,
    uses: u32,
    name: Option<String>,
    used_by: Vec<(String, String)>,
}

/// Permissions of all tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Grants(Vec<Grant>);

/// Certificate that a party with a token gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// A certificate, if the name has none.
    New,
    /// A certificate in any case: the token is bound to this name, or the request is repeated.
    Named,
}

/// Reason to refuse a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The token was never given out, or it is withdrawn, used up or over.
    #[error("the token is not known: it may be used up, over or withdrawn; ask for another one")]
    Unknown,
    /// The token is for another name.
    #[error("the token is for node `{0}`")]
    OtherName(String),
}

impl Grants {
    /// Parses the file's text. `Err` is the number of a line that cannot be read.
    pub(crate) fn parse(text: &str) -> Result<Grants, usize> {
        let parse = |(at, line)| parse(line).ok_or(at + 1);
        text.lines().enumerate().map(parse).collect::<Result<_, _>>().map(Grants)
    }

    /// Formats the file's text.
    pub(crate) fn to_text(&self) -> String {
        self.0.iter().map(line).collect()
    }

    /// Adds a token. False if there are [`MAX_TOKENS`] already.
    pub(crate) fn add(
        &mut self,
        now_unix_s: i64,
        secret: &str,
        ends_unix_s: i64,
        uses: u32,
        name: Option<String>,
    ) -> bool {
        self.forget_what_is_over(now_unix_s);
        if self.0.len() >= MAX_TOKENS {
            return false;
        }
        let secret_hash = hex(&sha256(secret.as_bytes()));
        self.0.push(Grant { secret_hash, ends_unix_s, uses, name, used_by: Vec::new() });
        true
    }

    /// Forgets all tokens, and returns how many of them could still be used.
    pub(crate) fn withdraw(&mut self, now_unix_s: i64) -> usize {
        self.forget_what_is_over(now_unix_s);
        std::mem::take(&mut self.0).iter().filter(|grant| grant.uses > 0).count()
    }

    /// Uses the token with this secret for a name and the key to certify. A repeat costs no use.
    pub(crate) fn use_up(
        &mut self,
        now_unix_s: i64,
        secret: &str,
        name: &str,
        key: &[u8],
    ) -> Result<Admission, GrantError> {
        self.forget_what_is_over(now_unix_s);
        let hash = hex(&sha256(secret.as_bytes()));
        let grant = self.0.iter_mut().find(|grant| grant.secret_hash == hash);
        let grant = grant.ok_or(GrantError::Unknown)?;
        if let Some(wanted) = &grant.name
            && wanted != name
        {
            return Err(GrantError::OtherName(wanted.clone()));
        }
        let user = (name.to_owned(), hex(&sha256(key)));
        if grant.used_by.contains(&user) {
            return Ok(Admission::Named);
        }
        grant.uses = grant.uses.checked_sub(1).ok_or(GrantError::Unknown)?;
        grant.used_by.push(user);
        Ok(if grant.name.is_some() { Admission::Named } else { Admission::New })
    }

    fn forget_what_is_over(&mut self, now_unix_s: i64) {
        self.0.retain(|grant| grant.ends_unix_s > now_unix_s);
    }
}

fn line(grant: &Grant) -> String {
    let Grant { secret_hash, ends_unix_s, uses, name, used_by } = grant;
    let name = name.as_deref().unwrap_or(ANYBODY);
    let used_by: String = used_by.iter().map(|(name, key)| format!(" {name}:{key}")).collect();
    format!("{secret_hash} {ends_unix_s} {uses} {name}{used_by}\n")
}

fn parse(line: &str) -> Option<Grant> {
    let mut words = line.split(' ');
    let secret_hash = words.next().filter(|hash| unhex(hash).is_some())?.to_owned();
    let ends_unix_s = words.next()?.parse().ok()?;
    let uses = words.next()?.parse().ok()?;
    let name = words.next()?;
    let name = (name != ANYBODY).then(|| name.to_owned());
    let user = |word: &str| {
        let (name, key) = word.split_once(':')?;
        Some((name.to_owned(), key.to_owned()))
    };
    let used_by = words.map(user).collect::<Option<_>>()?;
    Some(Grant { secret_hash, ends_unix_s, uses, name, used_by })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The grants as the next command reads them from the file.
    fn again(grants: &Grants) -> Grants {
        Grants::parse(&grants.to_text()).expect("read")
    }

    #[test]
    fn a_token_is_good_so_many_times_and_not_for_ever() {
        let mut grants = Grants::default();
        assert!(grants.add(0, "s", 100, 2, None));
        assert!(!grants.to_text().contains(" s "), "the secret itself is kept");
        let mut grants = again(&grants);
        assert_eq!(grants.use_up(1, "t", "a", b"1"), Err(GrantError::Unknown));
        assert_eq!(grants.use_up(1, "s", "a", b"1"), Ok(Admission::New));
        let mut grants = again(&grants);
        // A retry with the same key, because the first answer was lost.
        assert_eq!(grants.use_up(2, "s", "a", b"1"), Ok(Admission::Named));
        assert_eq!(grants.use_up(3, "s", "b", b"2"), Ok(Admission::New));
        let mut grants = again(&grants);
        assert_eq!(grants.use_up(3, "s", "c", b"3"), Err(GrantError::Unknown), "used up");
        assert_eq!(grants.use_up(3, "s", "a", b"4"), Err(GrantError::Unknown), "another key");
        assert_eq!(grants.use_up(99, "s", "b", b"2"), Ok(Admission::Named));
        assert_eq!(grants.use_up(100, "s", "b", b"2"), Err(GrantError::Unknown), "it is over");
    }

    #[test]
    fn a_token_with_a_name_is_for_that_name() {
        let mut grants = Grants::default();
        assert!(grants.add(0, "s", 100, 1, Some("a".to_owned())));
        let mut grants = again(&grants);
        let other = Err(GrantError::OtherName("a".to_owned()));
        assert_eq!(grants.use_up(1, "s", "b", b"1"), other);
        assert_eq!(grants.use_up(1, "s", "a", b"1"), Ok(Admission::Named));
        assert!(grants.add(1, "t", 100, 1, None));
        assert_eq!(grants.withdraw(1), 1, "the other one is used up");
        assert_eq!(grants.use_up(1, "s", "a", b"1"), Err(GrantError::Unknown));
        assert_eq!(grants.use_up(1, "t", "a", b"1"), Err(GrantError::Unknown));
    }

    #[test]
    fn there_is_a_limit_and_what_is_over_does_not_count() {
        let mut grants = Grants::default();
        for number in 0..MAX_TOKENS {
            assert!(grants.add(0, &number.to_string(), 10, 1, None));
        }
        assert!(!grants.add(9, "one more", 20, 1, None));
        assert!(grants.add(10, "one more", 20, 1, None));
        assert_eq!(Grants::parse("x 1 1 *"), Err(1));
        assert_eq!(Grants::parse("00 1 1 *\n00 1 1 * a"), Err(2));
    }
}
