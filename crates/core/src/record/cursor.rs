//! Where a reader of the record is, as text that it keeps.

/// A position: everything up to `base` was read, and of what lies between `base` and `target` the events up to `seq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Epoch and snapshot.
    pub base: (i32, String),
    /// Epoch and snapshot of the pass at hand, and the number reached in it.
    pub pass: Option<(i32, String, i64)>,
}

/// Digits, colons and commas as PostgreSQL writes a snapshot: `xmin:xmax:xid,xid`.
fn is_snapshot(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let number = |text: &str| (1..=19).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let [xmin, xmax, running] = parts.as_slice() else { return false };
    let (Ok(first), Ok(end)) = (xmin.parse::<u64>(), xmax.parse::<u64>()) else { return false };
    let mut before = None;
    number(xmin)
        && number(xmax)
        && 0 < first
        && first <= end
        && (running.is_empty()
            || running.split(',').all(|xid| {
                let value = xid.parse::<u64>().ok().filter(|value| number(xid) && first <= *value && *value < end && before < Some(*value));
                before = value;
                value.is_some()
            }))
}

impl Cursor {
    /// The beginning.
    pub fn start() -> Self {
        Cursor { base: (0, "1:1:".to_string()), pass: None }
    }

    /// Reads what [`Cursor::text`] wrote. `None` for anything else.
    pub fn read(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let epoch = |text: &str| text.parse::<i32>().ok().filter(|epoch| *epoch >= 0);
        let point = |number: &str, snapshot: &str| Some((epoch(number)?, is_snapshot(snapshot).then(|| snapshot.to_string())?));
        match parts.as_slice() {
            [number, snapshot] => Some(Cursor { base: point(number, snapshot)?, pass: None }),
            [number, snapshot, next, target, seq] => {
                let (next, target) = point(next, target)?;
                let seq = seq.parse::<i64>().ok().filter(|seq| *seq >= 0)?;
                Some(Cursor { base: point(number, snapshot)?, pass: Some((next, target, seq)) })
            }
            _ => None,
        }
    }

    /// As a reader keeps it.
    pub fn text(&self) -> String {
        let (epoch, base) = &self.base;
        match &self.pass {
            None => format!("{epoch}/{base}"),
            Some((next, target, seq)) => format!("{epoch}/{base}/{next}/{target}/{seq}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Cursor;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        for text in ["0/1:1:", "3/100:110:100,105", "0/1:1:/1/100:110:105/42"] {
            assert_eq!(Cursor::read(text).map(|cursor| cursor.text()).as_deref(), Some(text));
        }
        assert_eq!(Cursor::read(&Cursor::start().text()), Some(Cursor::start()));
        for text in [
            "",
            "0",
            "7",
            "0/",
            "a/1:1:",
            "-1/1:1:",
            "0/1:1",
            "0/0:1:",
            "0/2:1:",
            "0/1:1:1",
            "0/1:9:5,4",
            "0/1:9:5,5",
            "0/1:9:+5",
            "0/1:9:5,",
            "0/1:1:/1/1:1:",
            "0/1:1:/1/1:1:/-1",
            "0/1:1:/1/1:1:/x",
            "0/1:1:/1/1:1:/1/1",
            "0/ 1:1:",
            "0/99999999999999999999:1:",
        ] {
            assert_eq!(Cursor::read(text), None, "{text}");
        }
    }
}
