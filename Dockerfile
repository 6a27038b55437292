# An image with `ucpl`, torch's build for CPUs and no framework: docker build -t ucpl .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" ucpl convert runs/on-4 runs/on-8 --to zero1 -D dp=8
FROM python:3.12-slim

COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu '/src[remote,vault]' \
    && rm -rf /src \
    && ucpl demo

# The parsed grammar is kept there, whoever runs the image.
ENV XDG_CACHE_HOME=/tmp/cache
WORKDIR /work
ENTRYPOINT ["ucpl"]
CMD ["--help"]
