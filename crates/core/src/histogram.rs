//! Counts by size, from which percentiles are read with a bounded error. Histograms of parts add up to the histogram of the whole, which percentiles do not.

/// Relative error of a duration read back.
pub const DURATION_ERROR: f64 = 0.025;

/// Absolute error of a share (a confidence) read back.
pub const SHARE_ERROR: f64 = 0.005;

/// Buckets there can be: enough for durations of 10^18 microseconds.
const MOST_BUCKETS: usize = 1024;

/// How values fall into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Microseconds, in buckets that grow by a constant factor.
    Duration,
    /// 0 to 1, in a hundred buckets of one width.
    Share,
}

impl Scale {
    /// The scale of that name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "duration" => Some(Scale::Duration),
            "share" => Some(Scale::Share),
            _ => None,
        }
    }

    /// The growth of buckets of durations: any value of a bucket is within the error of the value that stands for it.
    fn growth() -> f64 {
        (1.0 + DURATION_ERROR) / (1.0 - DURATION_ERROR)
    }

    fn bucket(self, value: f64) -> usize {
        let place = match self {
            Scale::Duration if value < 1.0 => 0.0,
            Scale::Duration => 1.0 + (value.ln() / Self::growth().ln()).ceil(),
            Scale::Share => (value * 100.0).floor().min(99.0),
        };
        (place.max(0.0) as usize).min(MOST_BUCKETS - 1)
    }

    /// The value that stands for all of a bucket.
    fn value(self, bucket: usize) -> f64 {
        match self {
            Scale::Duration if bucket == 0 => 0.0,
            Scale::Duration => 2.0 * Self::growth().powi(bucket as i32 - 1) / (1.0 + Self::growth()),
            Scale::Share => (bucket as f64 + 0.5) / 100.0,
        }
    }
}

/// A histogram, one count for each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    fn count(&mut self, bucket: usize, times: u64) {
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] = self.counts[bucket].saturating_add(times);
    }

    /// Counts one value; one that is no number is left out.
    pub fn add(&mut self, scale: Scale, value: f64) {
        if !value.is_nan() {
            self.count(scale.bucket(value), 1);
        }
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// Values counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The smallest value that at least `share` of all values do not exceed, as `percentile_disc` defines it; `None` of an empty histogram.
    pub fn quantile(&self, scale: Scale, share: f64) -> Option<f64> {
        let total = self.total();
        let rank = ((total as f64 * share.clamp(0.0, 1.0)).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0u64;
        self.counts.iter().enumerate().find_map(|(bucket, count)| {
            seen = seen.saturating_add(*count);
            (*count > 0 && seen >= rank).then(|| scale.value(bucket))
        })
    }

    /// As bytes: for each bucket that holds something, how many buckets it lies after the one before, and its count, both in groups of seven bits.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut next = 0;
        for (bucket, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            put(&mut bytes, (bucket - next) as u64);
            put(&mut bytes, *count);
            next = bucket + 1;
        }
        bytes
    }

    /// Adds an encoded histogram; false where the bytes are none.
    pub fn merge(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let mut next = 0usize;
        while !rest.is_empty() {
            let (Some(gap), Some(count)) = (take(&mut rest), take(&mut rest)) else { return false };
            let Some(bucket) = usize::try_from(gap).ok().and_then(|gap| next.checked_add(gap)).filter(|bucket| *bucket < MOST_BUCKETS) else {
                return false;
            };
            self.count(bucket, count);
            next = bucket + 1;
        }
        true
    }
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    // Most numbers are small.
    if let [first @ ..=0x7f, rest @ ..] = *bytes {
        *bytes = rest;
        return Some(u64::from(*first));
    }
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(scale: Scale, values: &[f64]) -> Histogram {
        let mut histogram = Histogram::default();
        values.iter().for_each(|value| histogram.add(scale, *value));
        histogram
    }

    fn exact(values: &[f64], share: f64) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = ((sorted.len() as f64 * share).ceil() as usize).max(1);
        sorted[rank - 1]
    }

    proptest! {
        #[test]
        fn a_percentile_is_within_the_stated_error(values in prop::collection::vec(1.0..1e16f64, 1..200), share in 0.0..=1.0f64) {
            let (found, truth) = (of(Scale::Duration, &values).quantile(Scale::Duration, share), exact(&values, share));
            prop_assert!((found.unwrap() - truth).abs() <= truth * DURATION_ERROR * 1.000001);
        }

        #[test]
        fn a_share_is_within_the_stated_error(values in prop::collection::vec(0.0..=1.0f64, 1..200), share in 0.0..=1.0f64) {
            let (found, truth) = (of(Scale::Share, &values).quantile(Scale::Share, share), exact(&values, share));
            prop_assert!((found.unwrap() - truth).abs() <= SHARE_ERROR + 1e-9);
        }

        #[test]
        fn parts_add_up_to_the_whole(one in prop::collection::vec(0.0..1e12f64, 0..100), other in prop::collection::vec(0.0..1e12f64, 0..100)) {
            let mut sum = Histogram::default();
            prop_assert!(sum.merge(&of(Scale::Duration, &one).encode()));
            prop_assert!(sum.merge(&of(Scale::Duration, &other).encode()));
            let whole = of(Scale::Duration, &[one, other].concat());
            prop_assert_eq!(&sum, &whole);
            prop_assert_eq!(sum.encode(), whole.encode());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let mut histogram = Histogram::default();
            if histogram.merge(&bytes) {
                let mut again = Histogram::default();
                prop_assert!(again.merge(&histogram.encode()));
                prop_assert_eq!(again.total(), histogram.total());
            }
        }
    }

    #[test]
    fn odd_values_have_a_bucket() {
        let odd = of(Scale::Duration, &[f64::NAN, -5.0, 0.0, 0.5, f64::INFINITY, f64::MAX]);
        assert_eq!(odd.total(), 5);
        assert_eq!(odd.quantile(Scale::Duration, 0.5), Some(0.0));
        assert_eq!(Histogram::default().quantile(Scale::Share, 0.5), None);
        assert!(Histogram::default().is_empty());
    }
}
